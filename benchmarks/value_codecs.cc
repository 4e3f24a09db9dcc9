// Times one value codec alone: no selection, no indices. Built and run by value_codecs.py.
//
//     value_codecs FILE ID SIMD REPEATS [PARAMETERS]   ->   bytes, nanoseconds to encode, to
//     decode, relative error
//
// FILE has float32 values; SIMD is 0 scalar, 1 AVX2, 2 AVX-512, -1 the best of this processor.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "codecs.h"
#include "timing.h"

namespace deepreduce {
#define DR_VALUE_CODEC(id, Name, file, where, ...) extern const ValueCodec file##_codec;
#include "stages.def"
}  // namespace deepreduce

namespace {

using namespace deepreduce;

const ValueCodec* const codecs[] = {
#define DR_VALUE_CODEC(id, Name, file, where, ...) &file##_codec,
#include "stages.def"
};

std::vector<float> read_values(const char* path) {
  std::FILE* file = std::fopen(path, "rb");
  if (file == nullptr) return {};
  std::vector<float> values;
  float block[4096];
  for (size_t n; (n = std::fread(block, sizeof(float), 4096, file)) > 0;)
    values.insert(values.end(), block, block + n);
  std::fclose(file);
  return values;
}

double relative_error(const std::vector<float>& got, const std::vector<float>& values) {
  double lost = 0, all = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double difference = static_cast<double>(got[i]) - values[i];
    lost += difference * difference;
    all += static_cast<double>(values[i]) * values[i];
  }
  return std::sqrt(lost / all);
}

}  // namespace

int main(int arguments, char** words) {
  if (arguments < 5 || arguments > 5 + DR_STAGE_PARAMETERS) return 2;
  const std::vector<float> values = read_values(words[1]);
  const uint32_t count = static_cast<uint32_t>(values.size());
  const ValueCodec* codec = find_codec(codecs, std::atoi(words[2]));
  if (count == 0 || codec == nullptr) return 2;
  const int wanted = std::atoi(words[3]), best = static_cast<int>(best_simd());
  const Simd simd = static_cast<Simd>(wanted < 0 ? best : std::min(wanted, best));
  double parameters[DR_STAGE_PARAMETERS] = {};
  for (int i = 5; i < arguments; ++i) parameters[i - 5] = std::atof(words[i]);

  Pool pool(size_t{64} * count + (1 << 22));
  dr_context caller{};
  caller.allocate = allocate;
  caller.user = &pool;
  std::vector<float> kept(count, 1.0f), decoded(count, 1.0f);
  std::vector<double> encode, decode;
  uint64_t bytes = 0;
  try {
    for (int repeat = 0; repeat < std::max(std::atoi(words[4]), 1); ++repeat) {
      pool.used = 0;
      Arena arena(&caller);
      Context context{arena, simd};
      ByteWriter section(arena);
      ValueEncoding encoding{count, values.data(), parameters, 1, kept.data(), nullptr};
      encode.push_back(nanoseconds([&] { codec->encode(context, encoding, section); }));
      bytes = section.size();
      ByteReader reader(section.data(), bytes, "value section");
      decode.push_back(nanoseconds([&] { codec->decode(context, reader, count, decoded.data()); }));
      if (std::memcmp(kept.data(), decoded.data(), sizeof(float) * count) != 0) {
        std::fprintf(stderr, "%s: expected to decode what the encoder said, got other values\n",
                     codec->name);
        return 1;
      }
    }
  } catch (const Failure& failure) {
    std::fprintf(stderr, "%s: %s\n", codec->name, failure.message);
    return 1;
  }
  std::printf("%llu %.0f %.0f %.9g\n", static_cast<unsigned long long>(bytes), median(encode),
              median(decode), relative_error(decoded, values));
  return 0;
}
