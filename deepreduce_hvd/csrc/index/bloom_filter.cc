#include "index/bloom_filter.h"

#include "support/simd.h"

#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns about its own AVX-512 header
#endif
#include <immintrin.h>
#endif

namespace deepreduce {
namespace {

constexpr uint32_t kScanBlock = 4096;
constexpr uint32_t kVector = 16;

// Keeps the indices whose bit of one hash is set, in place; returns their number. Overwrites up to
// kVector entries after the n indices.
using Sieve = uint32_t (*)(const BloomFilter&, uint32_t hash_number, uint32_t* indices, uint32_t n);

uint32_t sieve_scalar(const BloomFilter& filter, uint32_t hash_number, uint32_t* indices,
                      uint32_t n) {
  uint32_t kept = 0;
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t index = indices[i];
    const uint32_t bit = filter.position(murmur_block(index), hash_number);
    indices[kept] = index;
    kept += (filter.words[bit >> 5] >> (bit & 31)) & 1u;
  }
  return kept;
}

DR_INLINE void positions(const BloomFilter& filter, uint32_t hash_number, const uint32_t* indices,
                         uint32_t n, uint32_t* bits) {
  const BloomFilter copy = filter;  // a local, which `bits` cannot alias
  for (uint32_t i = 0; i < n; ++i) bits[i] = copy.position(murmur_block(indices[i]), hash_number);
}

#if defined(__x86_64__)
DR_AVX2 void positions_avx2(const BloomFilter& filter, uint32_t hash_number,
                            const uint32_t* indices, uint32_t n, uint32_t* bits) {
  positions(filter, hash_number, indices, n, bits);
}

DR_AVX512 void positions_avx512(const BloomFilter& filter, uint32_t hash_number,
                                const uint32_t* indices, uint32_t n, uint32_t* bits) {
  positions(filter, hash_number, indices, n, bits);
}

template <unsigned bits>
DR_AVX2 inline __m256i rotate(__m256i x) {
  return _mm256_or_si256(_mm256_slli_epi32(x, bits), _mm256_srli_epi32(x, 32 - bits));
}

DR_AVX2 uint32_t sieve_avx2(const BloomFilter& filter, uint32_t hash_number, uint32_t* indices,
                            uint32_t n) {
  const __m256i seed = _mm256_set1_epi32(static_cast<int>(murmur_seed(hash_number)));
  const __m256i m = _mm256_set1_epi64x(filter.bits);
  const __m256i low5 = _mm256_set1_epi32(31);
  uint32_t kept = 0, i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256i index = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(indices + i));
    __m256i x = _mm256_mullo_epi32(index, _mm256_set1_epi32(static_cast<int>(0xCC9E2D51u)));
    x = _mm256_mullo_epi32(rotate<15>(x), _mm256_set1_epi32(0x1B873593));
    x = rotate<13>(_mm256_xor_si256(seed, x));
    x = _mm256_add_epi32(_mm256_add_epi32(_mm256_slli_epi32(x, 2), x),
                         _mm256_set1_epi32(static_cast<int>(0xE6546B64u)));
    x = _mm256_xor_si256(x, _mm256_set1_epi32(4));
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
    x = _mm256_mullo_epi32(x, _mm256_set1_epi32(static_cast<int>(0x85EBCA6Bu)));
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 13));
    x = _mm256_mullo_epi32(x, _mm256_set1_epi32(static_cast<int>(0xC2B2AE35u)));
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
    const __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(x, m), 32);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), m);
    const __m256i bit = _mm256_blend_epi32(even, odd, 0xAA);
    const __m256i word = _mm256_i32gather_epi32(reinterpret_cast<const int*>(filter.words),
                                                _mm256_srli_epi32(bit, 5), 4);
    const __m256i top =
        _mm256_sllv_epi32(word, _mm256_sub_epi32(low5, _mm256_and_si256(bit, low5)));
    // lanes whose bit is set move to the front; the mask extracts their numbers, one per byte
    const unsigned mask = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(top)));
    const uint64_t chosen =
        _pext_u64(0x0706050403020100ull, _pdep_u64(mask, 0x0101010101010101ull) * 0xFF);
    const __m256i lanes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(chosen)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(indices + kept),
                        _mm256_permutevar8x32_epi32(index, lanes));
    kept += static_cast<uint32_t>(__builtin_popcount(mask));
  }
  for (; i < n; ++i) {
    const uint32_t index = indices[i];
    const uint32_t bit = filter.position(murmur_block(index), hash_number);
    if ((filter.words[bit >> 5] >> (bit & 31)) & 1u) indices[kept++] = index;
  }
  return kept;
}

DR_AVX512 uint32_t sieve_avx512(const BloomFilter& filter, uint32_t hash_number, uint32_t* indices,
                                uint32_t n) {
  const __m512i seed = _mm512_set1_epi32(static_cast<int>(murmur_seed(hash_number)));
  const __m512i m = _mm512_set1_epi64(filter.bits);
  const __m512i one = _mm512_set1_epi32(1), low5 = _mm512_set1_epi32(31);
  uint32_t kept = 0;
  for (uint32_t i = 0; i < n; i += 16) {
    const __mmask16 valid = n - i >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << (n - i)) - 1);
    const __m512i index = _mm512_maskz_loadu_epi32(valid, indices + i);
    __m512i x = _mm512_mullo_epi32(index, _mm512_set1_epi32(static_cast<int>(0xCC9E2D51u)));
    x = _mm512_mullo_epi32(_mm512_rol_epi32(x, 15), _mm512_set1_epi32(0x1B873593));
    x = _mm512_rol_epi32(_mm512_xor_si512(seed, x), 13);
    x = _mm512_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(x, 2), x),
                         _mm512_set1_epi32(static_cast<int>(0xE6546B64u)));
    x = _mm512_xor_si512(x, _mm512_set1_epi32(4));
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32(static_cast<int>(0x85EBCA6Bu)));
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 13));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32(static_cast<int>(0xC2B2AE35u)));
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
    const __m512i even = _mm512_srli_epi64(_mm512_mul_epu32(x, m), 32);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), m);
    const __m512i bit = _mm512_mask_blend_epi32(0xAAAA, even, odd);
    const __m512i word = _mm512_i32gather_epi32(_mm512_srli_epi32(bit, 5), filter.words, 4);
    const __mmask16 set = _mm512_mask_test_epi32_mask(
        valid, word, _mm512_sllv_epi32(one, _mm512_and_si512(bit, low5)));
    // compress in a register and store all of it: the compressing store is many times slower on
    // some processors
    _mm512_storeu_si512(indices + kept, _mm512_maskz_compress_epi32(set, index));
    kept += static_cast<uint32_t>(__builtin_popcount(set));
  }
  return kept;
}
#endif

Sieve sieve_for(Simd simd) {
#if defined(__x86_64__)
  if (simd == Simd::avx512) return sieve_avx512;
  if (simd == Simd::avx2) return sieve_avx2;
#endif
  static_cast<void>(simd);
  return sieve_scalar;
}

}  // namespace

void filter_positions(Simd simd, const BloomFilter& filter, uint32_t hash_number,
                      const uint32_t* indices, uint32_t n, uint32_t* bits) {
#if defined(__x86_64__)
  if (simd == Simd::avx512) return positions_avx512(filter, hash_number, indices, n, bits);
  if (simd == Simd::avx2) return positions_avx2(filter, hash_number, indices, n, bits);
#endif
  static_cast<void>(simd);
  positions(filter, hash_number, indices, n, bits);
}

void filter_insert(Simd simd, BloomFilter& filter, const uint32_t* indices, uint32_t n) {
  uint32_t bits[kScanBlock];
  for (uint32_t first = 0; first < n; first += kScanBlock) {
    const uint32_t block = n - first < kScanBlock ? n - first : kScanBlock;
    for (uint32_t hash_number = 0; hash_number < filter.hashes; ++hash_number) {
      filter_positions(simd, filter, hash_number, indices + first, block, bits);
      for (uint32_t i = 0; i < block; ++i) filter.words[bits[i] >> 5] |= 1u << (bits[i] & 31);
    }
  }
}

Positives::Positives(Arena& arena, uint64_t expected)
    : arena_(arena), data_(arena.array<uint32_t>(expected)), capacity_(expected) {}

void Positives::append(const uint32_t* indices, uint32_t n) {
  if (n > capacity_ - size_) {
    const uint64_t capacity = size_ + n + capacity_ / 2;
    uint32_t* data = arena_.array<uint32_t>(capacity);
    if (size_ != 0) std::memcpy(data, data_, size_ * sizeof(uint32_t));
    data_ = data;
    capacity_ = capacity;
  }
  if (n != 0) std::memcpy(data_ + size_, indices, n * sizeof(uint32_t));
  size_ += n;
}

void scan_universe(Simd simd, const BloomFilter& filter, uint32_t d, uint64_t enough,
                   Positives& positives) {
  const Sieve sieve = sieve_for(simd);
  uint32_t block[kScanBlock + kVector];
  for (uint32_t first = 0; first < d && positives.size() < enough;) {
    const uint32_t n = d - first < kScanBlock ? d - first : kScanBlock;
    for (uint32_t i = 0; i < n; ++i) block[i] = first + i;
    uint32_t kept = n;
    for (uint32_t hash_number = 0; hash_number < filter.hashes && kept != 0; ++hash_number)
      kept = sieve(filter, hash_number, block, kept);
    positives.append(block, kept);
    first += n;
  }
}

}  // namespace deepreduce
