// Turning a square of 16 x 16 words of 32 bits.
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

}  // namespace c2c
