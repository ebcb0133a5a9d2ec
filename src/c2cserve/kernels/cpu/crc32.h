// CRC-32 as zlib has it (reflected polynomial 0xEDB88320), by carry-less multiplication: 64 bytes are
// folded at a time, then reduced. After "Fast CRC Computation for Generic Polynomials Using
// PCLMULQDQ Instruction" (Intel, 2009), whose constants these are.
#pragma once
#if defined(__PCLMUL__)
#include <immintrin.h>

#include <cstdint>

namespace c2c {

inline __m128i crc32_fold(__m128i sum, __m128i by, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(sum, by, 0x00);
  const __m128i high = _mm_clmulepi64_si128(sum, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

inline uint32_t crc32_reduce(__m128i sum, __m128i by_16) {
  const __m128i by_8 = _mm_set_epi64x(0, 0x0163cd6124);
  const __m128i quotient_and_polynomial = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  const __m128i low_word = _mm_setr_epi32(-1, 0, -1, 0);
  sum = _mm_xor_si128(_mm_srli_si128(sum, 8), _mm_clmulepi64_si128(sum, by_16, 0x10));
  const __m128i rest = _mm_srli_si128(sum, 4);
  sum = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(sum, low_word), by_8, 0x00), rest);
  // Barrett's reduction.
  __m128i part = _mm_and_si128(sum, low_word);
  part = _mm_and_si128(_mm_clmulepi64_si128(part, quotient_and_polynomial, 0x10), low_word);
  part = _mm_clmulepi64_si128(part, quotient_and_polynomial, 0x00);
  return ~uint32_t(_mm_extract_epi32(_mm_xor_si128(sum, part), 1));
}

// `size`: a multiple of 64, and more than 0.
inline uint32_t crc32(const uint8_t* data, int64_t size) {
  // Weights lie in pages of 4 KiB, and the processor itself fetches none beyond the one it reads:
  // a page's first lines would be waited for.
  constexpr int64_t kFetchedBytes = 4096;
  const __m128i by_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  const __m128i by_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  const auto at = [data](int64_t i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + i));
  };
  __m128i a = _mm_xor_si128(at(0), _mm_cvtsi32_si128(-1)), b = at(16), c = at(32), d = at(48);
  for (int64_t i = 64; i < size; i += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(data + i + kFetchedBytes), _MM_HINT_T0);
    a = crc32_fold(a, by_64, at(i));
    b = crc32_fold(b, by_64, at(i + 16));
    c = crc32_fold(c, by_64, at(i + 32));
    d = crc32_fold(d, by_64, at(i + 48));
  }
  return crc32_reduce(crc32_fold(crc32_fold(crc32_fold(a, by_16, b), by_16, c), by_16, d), by_16);
}

}  // namespace c2c
#endif
