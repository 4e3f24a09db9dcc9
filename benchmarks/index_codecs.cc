// Times one index codec alone: no selection, no values. Built and run by index_codecs.py.
//
//     index_codecs D DENSITY ID SIMD [PARAMETERS]   ->   milliseconds to encode, to decode, of d
//     float additions
//
// SIMD is 0 scalar, 1 AVX2, 2 AVX-512, -1 the best of this processor.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "codecs.h"
#include "support/random.h"
#include "timing.h"

namespace deepreduce {
#define DR_INDEX_CODEC(id, Name, file, where, ...) extern const IndexCodec file##_codec;
#include "stages.def"
}  // namespace deepreduce

namespace {

using namespace deepreduce;
constexpr int kRepeats = 31;

const IndexCodec* const codecs[] = {
#define DR_INDEX_CODEC(id, Name, file, where, ...) &file##_codec,
#include "stages.def"
};

void time_codec(const IndexCodec& codec, const double* parameters, uint32_t d,
                const std::vector<uint32_t>& indices, Simd simd) {
  const uint32_t count = static_cast<uint32_t>(indices.size());
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
      std::fprintf(stderr, "%s: expected the indices back, got others\n", codec.name);
      std::exit(1);
    }
  }
  std::printf("%.4f\t%.4f\t%.4f\n", 1e-6 * median(encode), 1e-6 * median(decode),
              1e-6 * median(add));
}

}  // namespace

int main(int arguments, char** words) {
  if (arguments < 5 || arguments > 5 + DR_STAGE_PARAMETERS) return 2;
  const uint32_t d = static_cast<uint32_t>(std::strtoul(words[1], nullptr, 10));
  const double limit = std::strtod(words[2], nullptr) * 4294967296.0;
  const IndexCodec* codec = find_codec(codecs, std::atoi(words[3]));
  if (codec == nullptr) return 2;
  std::vector<uint32_t> indices;
  for (uint32_t i = 0; i < d; ++i)
    if (static_cast<double>(random32(1, i)) < limit) indices.push_back(i);
  const int wanted = std::atoi(words[4]), best = static_cast<int>(best_simd());
  double parameters[DR_STAGE_PARAMETERS] = {};
  for (int i = 5; i < arguments; ++i) parameters[i - 5] = std::atof(words[i]);
  time_codec(*codec, parameters, d, indices,
             static_cast<Simd>(wanted < 0 ? best : std::min(wanted, best)));
  return 0;
}
