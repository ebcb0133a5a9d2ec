// Turning squares of words of 32 bits: 16 x 16, or 4 rows of 16.
#pragma once
#include <cstdint>
#include <cstring>

#include "../simd.h"

namespace c2c {

#if defined(__AVX512F__)
// Pairs of words, then of pairs, within the 128-bit parts; then the parts themselves.
inline void transpose16(__m512i (&v)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // v[4 g + c]: part p holds column 4 p + c of rows 4 g to 4 g + 3.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i low = _mm512_shuffle_i32x4(v[c], v[4 + c], 0x44);
    const __m512i low_high = _mm512_shuffle_i32x4(v[c], v[4 + c], 0xee);
    const __m512i high = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0x44);
    const __m512i high_high = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0xee);
    t[c] = _mm512_shuffle_i32x4(low, high, 0x88);
    t[4 + c] = _mm512_shuffle_i32x4(low, high, 0xdd);
    t[8 + c] = _mm512_shuffle_i32x4(low_high, high_high, 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(low_high, high_high, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) v[i] = t[i];
}
#endif

// out[c][r] = in[r][c] for r < rows and c < columns, 16 at most; strides are in words of 32 bits.
template <typename Word>
inline void transpose16(Word* out, int64_t out_stride, const Word* in, int64_t in_stride, int rows,
                        int columns) {
  static_assert(sizeof(Word) == 4);
#if defined(__AVX512F__)
  __m512i v[16];
  if (rows == 16) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) v[i] = _mm512_loadu_si512(in + i * in_stride);
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
      v[i] = i < rows ? _mm512_loadu_si512(in + i * in_stride) : _mm512_setzero_si512();
  }
  transpose16(v);
  if (rows == 16 && columns == 16) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + i * out_stride, v[i]);
  } else {
    const __mmask16 wanted = __mmask16((1u << rows) - 1);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
      if (i < columns) _mm512_mask_storeu_epi32(out + i * out_stride, wanted, v[i]);
  }
#else
  for (int c = 0; c < columns; ++c)
    for (int r = 0; r < rows; ++r) out[c * out_stride + r] = in[r * in_stride + c];
#endif
}

// The same of 4 rows at most. It reads 16 words of each.
template <typename Word>
inline void transpose4(Word* out, int64_t out_stride, const Word* in, int64_t in_stride, int rows,
                       int columns) {
  static_assert(sizeof(Word) == 4);
#if defined(__AVX512F__)
  __m512i v[4], t[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    v[i] = i < rows ? _mm512_loadu_si512(in + i * in_stride) : _mm512_setzero_si512();
  t[0] = _mm512_unpacklo_epi32(v[0], v[1]);
  t[1] = _mm512_unpackhi_epi32(v[0], v[1]);
  t[2] = _mm512_unpacklo_epi32(v[2], v[3]);
  t[3] = _mm512_unpackhi_epi32(v[2], v[3]);
  v[0] = _mm512_unpacklo_epi64(t[0], t[2]);
  v[1] = _mm512_unpackhi_epi64(t[0], t[2]);
  v[2] = _mm512_unpacklo_epi64(t[1], t[3]);
  v[3] = _mm512_unpackhi_epi64(t[1], t[3]);
  // Part p of v[c] holds column 4 p + c.
  const __mmask8 wanted = __mmask8((1u << rows) - 1);
  for (int c = 0; c < columns; c += 4) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      if (c + i < columns)
        _mm_mask_storeu_epi32(out + (c + i) * out_stride, wanted, _mm512_castsi512_si128(v[i]));
      v[i] = _mm512_shuffle_i32x4(v[i], v[i], 0x39);  // the next part first
    }
  }
#else
  for (int c = 0; c < columns; ++c)
    for (int r = 0; r < rows; ++r) out[c * out_stride + r] = in[r * in_stride + c];
#endif
}

}  // namespace c2c
