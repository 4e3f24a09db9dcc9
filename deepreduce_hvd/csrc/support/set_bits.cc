#include "support/set_bits.h"

#include "support/simd.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace deepreduce {
namespace {

uint64_t word_at(const uint8_t* data, uint64_t bytes, uint64_t at) {
  uint64_t word = 0;
  std::memcpy(&word, data + at, bytes - at < 8 ? bytes - at : 8);
  return word;
}

uint64_t scalar_positions(const uint8_t* data, uint64_t bytes, uint64_t at, uint32_t* out,
                          uint64_t found, uint32_t capacity) {
  for (; at < bytes; at += 8) {
    for (uint64_t word = word_at(data, bytes, at); word != 0; word &= word - 1) {
      if (found == capacity) return found + 1;
      out[found++] = static_cast<uint32_t>(8 * at + static_cast<uint64_t>(__builtin_ctzll(word)));
    }
  }
  return found;
}

#if defined(__x86_64__)
// Always writes eight positions per iteration, so that branches rarely depend on the number of set
// bits.
DR_AVX2 uint64_t avx2_positions(const uint8_t* data, uint64_t bytes, uint32_t* out,
                                uint32_t capacity) {
  uint64_t found = 0, at = 0;
  for (; at + 8 <= bytes && found + 64 <= capacity; at += 8) {
    uint64_t word = word_at(data, bytes, at);
    if (word == 0) continue;
    const uint64_t after = found + static_cast<uint64_t>(_mm_popcnt_u64(word));
    do {
      for (unsigned i = 0; i < 8; ++i) {
        out[found + i] = static_cast<uint32_t>(8 * at + _tzcnt_u64(word));
        word = _blsr_u64(word);
      }
      found += 8;
    } while (found < after);
    found = after;
  }
  return scalar_positions(data, bytes, at, out, found, capacity);
}

// Compresses a register with the positions of 16 bits to those of the set bits.
DR_AVX512 uint64_t avx512_positions(const uint8_t* data, uint64_t bytes, uint32_t* out,
                                    uint32_t capacity) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  uint64_t found = 0, at = 0;
  for (; at + 8 <= bytes && found + 64 <= capacity; at += 8) {
    const uint64_t word = word_at(data, bytes, at);
    if (word == 0) continue;
    for (unsigned part = 0; part < 64; part += 16) {
      const uint32_t mask = static_cast<uint16_t>(word >> part);
      const __m512i positions =
          _mm512_add_epi32(first, _mm512_set1_epi32(static_cast<int>(8 * at + part)));
      _mm512_storeu_si512(out + found,
                          _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), positions));
      found += static_cast<uint64_t>(_mm_popcnt_u32(mask));
    }
  }
  return scalar_positions(data, bytes, at, out, found, capacity);
}
#endif

}  // namespace

uint64_t set_bit_positions(Simd simd, const uint8_t* data, uint64_t bytes, uint32_t* out,
                           uint32_t capacity) {
#if defined(__x86_64__)
  if (simd == Simd::avx512) return avx512_positions(data, bytes, out, capacity);
  if (simd == Simd::avx2) return avx2_positions(data, bytes, out, capacity);
#endif
  (void)simd;
  return scalar_positions(data, bytes, 0, out, 0, capacity);
}

}  // namespace deepreduce
