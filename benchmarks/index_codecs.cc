// Times the index codecs alone: no selection, no values. Built and run by index_codecs.py.
//
//     index_codecs D DENSITY   ->   a line a codec: name, milliseconds to encode, to decode, of d float additions
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "codecs.h"
#include "random.h"

namespace deepreduce {
extern const IndexCodec bitmap_codec, rle_codec, huffman_codec, rice_codec, elias_fano_codec;
}

namespace {

using namespace deepreduce;
constexpr int kRepeats = 31;

// One block of memory that every call starts anew, touched beforehand: a training step finds its scratch memory so.
struct Pool {
  explicit Pool(size_t size) : memory(size, 1) {}
  std::vector<char> memory;
  size_t used = 0;
};

void* allocate(void* user, size_t bytes) {
  Pool& pool = *static_cast<Pool*>(user);
  const size_t at = (pool.used + 63) / 64 * 64;
  if (at + bytes > pool.memory.size()) return nullptr;
  pool.used = at + bytes;
  return pool.memory.data() + at;
}

template <class Work>
double milliseconds(Work work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> times) {
  std::nth_element(times.begin(), times.begin() + kRepeats / 2, times.end());
  return times[kRepeats / 2];
}

void time_codec(const char* name, const IndexCodec& codec, double parameter, uint32_t d, const std::vector<uint32_t>& indices,
                Simd simd) {
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
    IndexEncoding encoding{d, count, indices.data(), parameters, 32, 0, count, indices.data(), false};
    add.push_back(milliseconds([&] {
      for (uint32_t i = 0; i < d; ++i) sum[i] += gradient[i];
    }));
    encode.push_back(milliseconds([&] { codec.encode(context, encoding, section); }));
    ByteReader reader(section.data(), section.size(), "index section");
    decode.push_back(milliseconds([&] { codec.decode(context, reader, d, count, decoded.data()); }));
    if (decoded != indices) {
      std::fprintf(stderr, "%s: expected the indices back, got others\n", name);
      std::exit(1);
    }
  }
  std::printf("%s\t%.4f\t%.4f\t%.4f\n", name, median(encode), median(decode), median(add));
}

}  // namespace

int main(int arguments, char** values) {
  if (arguments != 3) return 2;
  const uint32_t d = static_cast<uint32_t>(std::strtoul(values[1], nullptr, 10));
  const double limit = std::strtod(values[2], nullptr) * 4294967296.0;
  std::vector<uint32_t> indices;
  for (uint32_t i = 0; i < d; ++i)
    if (static_cast<double>(random32(1, i)) < limit) indices.push_back(i);
  Simd simd = Simd::scalar;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2")) simd = Simd::avx2;
  if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")) simd = Simd::avx512;
#endif
  time_codec("Bitmap", bitmap_codec, 0, d, indices, simd);
  time_codec("RLE", rle_codec, 0, d, indices, simd);
  time_codec("Huffman", huffman_codec, 0, d, indices, simd);
  time_codec("Huffman(delta=True)", huffman_codec, 1, d, indices, simd);
  time_codec("Rice", rice_codec, 0, d, indices, simd);
  time_codec("Rice, scalar", rice_codec, 0, d, indices, Simd::scalar);
  time_codec("EliasFano", elias_fano_codec, 0, d, indices, simd);
  return 0;
}
