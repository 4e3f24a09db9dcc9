// Times the index codecs alone: no selection, no values. Built and run by index_codecs.py.
//
//     index_codecs D DENSITY   ->   one line per codec: name, milliseconds to encode, to decode, of
//     d
//     float additions
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "codecs.h"
#include "support/random.h"
#include "timing.h"

namespace deepreduce {
extern const IndexCodec bitmap_codec, rle_codec, huffman_codec, rice_codec, elias_fano_codec;
}

namespace {

using namespace deepreduce;
constexpr int kRepeats = 31;

void time_codec(const char* name, const IndexCodec& codec, double parameter, uint32_t d,
                const std::vector<uint32_t>& indices, Simd simd) {
  const uint32_t count = static_cast<uint32_t>(indices.size());
  const double parameters[DR_STAGE_PARAMETERS] = {parameter};
  Pool pool(d + size_t{64} * count + (1 << 20));
  dr_context caller{};
  caller.allocate = allocate;
  caller.user = &pool;
  std::vector<uint32_t> decoded(count);
  std::vector<float> sum(d), gradient(d, 1.0f);
  std::vector<double> encode, decode, add;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    pool.used = 0;
    Arena arena(&caller);
    Context context{arena, simd};
    ByteWriter section(arena);
    IndexEncoding encoding{d, count, indices.data(), parameters, 32,
                           0, count, indices.data(), false};
    add.push_back(nanoseconds([&] {
      for (uint32_t i = 0; i < d; ++i) sum[i] += gradient[i];
    }));
    encode.push_back(nanoseconds([&] { codec.encode(context, encoding, section); }));
    ByteReader reader(section.data(), section.size(), "index section");
    decode.push_back(nanoseconds([&] { codec.decode(context, reader, d, count, decoded.data()); }));
    if (decoded != indices) {
      std::fprintf(stderr, "%s: expected the indices back, got others\n", name);
      std::exit(1);
    }
  }
  std::printf("%s\t%.4f\t%.4f\t%.4f\n", name, 1e-6 * median(encode), 1e-6 * median(decode),
              1e-6 * median(add));
}

}  // namespace

int main(int arguments, char** values) {
  if (arguments != 3) return 2;
  const uint32_t d = static_cast<uint32_t>(std::strtoul(values[1], nullptr, 10));
  const double limit = std::strtod(values[2], nullptr) * 4294967296.0;
  std::vector<uint32_t> indices;
  for (uint32_t i = 0; i < d; ++i)
    if (static_cast<double>(random32(1, i)) < limit) indices.push_back(i);
  const Simd simd = best_simd();
  time_codec("Bitmap", bitmap_codec, 0, d, indices, simd);
  time_codec("RLE", rle_codec, 0, d, indices, simd);
  time_codec("Huffman", huffman_codec, 0, d, indices, simd);
  time_codec("Huffman(delta=True)", huffman_codec, 1, d, indices, simd);
  time_codec("Rice", rice_codec, 0, d, indices, simd);
  time_codec("Rice, scalar", rice_codec, 0, d, indices, Simd::scalar);
  time_codec("EliasFano", elias_fano_codec, 0, d, indices, simd);
  return 0;
}
