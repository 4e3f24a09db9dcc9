#include "support/packed_codes.h"

#include "support/simd.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace deepreduce {
namespace {

void pack_scalar(const uint8_t* codes, uint32_t n, unsigned bits, uint8_t* out) {
  for (uint32_t i = 0; i < n; i += 8, out += bits) {
    uint64_t word = 0;
    for (unsigned j = 0; j < 8; ++j) word |= static_cast<uint64_t>(codes[i + j]) << (j * bits);
    std::memcpy(out, &word, 8);
  }
}

// Each group of 8 codes reads 8 bytes.
void unpack_scalar(const uint8_t* packed, uint32_t n, unsigned bits, uint8_t* codes) {
  const uint64_t mask = (1u << bits) - 1;
  for (uint32_t i = 0; i < n; i += 8, packed += bits) {
    uint64_t word;
    std::memcpy(&word, packed, 8);
    for (unsigned j = 0; j < 8; ++j)
      codes[i + j] = static_cast<uint8_t>((word >> (j * bits)) & mask);
  }
}

#if defined(__x86_64__)
DR_AVX2 void pack_avx2(const uint8_t* codes, uint32_t n, unsigned bits, uint8_t* out) {
  const uint64_t mask = 0x0101010101010101ull * ((1u << bits) - 1);
  for (uint32_t i = 0; i < n; i += 8, out += bits) {
    uint64_t eight;
    std::memcpy(&eight, codes + i, 8);
    const uint64_t word = _pext_u64(eight, mask);
    std::memcpy(out, &word, 8);
  }
}

DR_AVX2 void unpack_avx2(const uint8_t* packed, uint32_t n, unsigned bits, uint8_t* codes) {
  const uint64_t mask = 0x0101010101010101ull * ((1u << bits) - 1);
  for (uint32_t i = 0; i < n; i += 8, packed += bits) {
    uint64_t word;
    std::memcpy(&word, packed, 8);
    const uint64_t eight = _pdep_u64(word, mask);
    std::memcpy(codes + i, &eight, 8);
  }
}

constexpr auto pack_avx512 = pack_avx2;
constexpr auto unpack_avx512 = unpack_avx2;
#endif

}  // namespace

void pack_codes(Simd simd, const uint8_t* codes, uint32_t n, unsigned bits, uint8_t* out) {
  DR_CHOOSE(simd, pack)(codes, n, bits, out);
}

void unpack_codes(Simd simd, const uint8_t* packed, const uint8_t* end, uint32_t n, unsigned bits,
                  uint8_t* codes) {
  // a group has only `bits` bytes; groups at the end of the section read from a padded copy
  const uint64_t readable = static_cast<uint64_t>(end - packed);
  const uint32_t groups = (n + 7) / 8,
                 safe = readable < 8 ? 0 : static_cast<uint32_t>((readable - 8) / bits + 1);
  const uint32_t straight = safe < groups ? safe : groups;
  const auto unpack = DR_CHOOSE(simd, unpack);
  unpack(packed, 8 * straight, bits, codes);
  for (uint32_t group = straight; group < groups; ++group) {
    const uint8_t* at = packed + uint64_t{group} * bits;
    uint8_t padded[8] = {};
    std::memcpy(padded, at, static_cast<size_t>(end - at < 8 ? end - at : 8));
    unpack(padded, 8, bits, codes + 8 * group);
  }
}

}  // namespace deepreduce
