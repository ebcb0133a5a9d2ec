// How rows of w meet rows of x in `linear`, by the type of w.
//
//   float32 units   w becomes float32 by `load_half`, x is float32: one multiply-add per column
//   bf16 units      w is read as it is, x is rounded to bf16: one instruction multiplies two
//                   columns and adds both products to a float32
//
// Either way an accumulator's lane takes its columns in order, and `sum` adds the lanes.
#pragma once
#include "simd.h"

namespace c2c {

constexpr int kPair = 2 * kLanes;  // columns of one step

// Two vectors, as factors for the bf16 units, which take subnormal numbers for zeros.
inline void round_pair(bf16* out, vec low, vec high) {
#if defined(__AVX512BF16__)
  const __m512bh both = _mm512_cvtne2ps_pbh(high.v, low.v);
  _mm512_storeu_si512(out, (__m512i)both);
#else
  store(out, low);
  store(out + kLanes, high);
#endif
}

#if defined(__AVX512F__)
// The order of two rows of 16 bf16 values, as one row of pairs.
alignas(64) inline constexpr uint16_t kInterleaved[32] = {
    0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
    8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
#endif

// out[2 l], out[2 l + 1] = a[l], b[l] in bf16, for 16 values of each. `out` is aligned to a line.
inline void store_pairs(bf16* out, const vec* a, const vec* b) {
#if defined(__AVX512BF16__)
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(b->v, a->v);
  _mm512_store_si512(out, _mm512_permutexvar_epi16(_mm512_load_si512(kInterleaved), both));
#else
  constexpr int kValues = 16;
  bf16 low[kValues], high[kValues];
  for (int p = 0; p < kValues / kLanes; ++p) {
    store(low + p * kLanes, a[p]);
    store(high + p * kLanes, b[p]);
  }
  for (int l = 0; l < kValues; ++l) {
    out[2 * l] = low[l];
    out[2 * l + 1] = high[l];
  }
#endif
}

#if defined(__AVX512BF16__) || defined(C2C_TILE_MODEL)
#define C2C_ROUNDS 1
// Weights in bf16 that meet x as it is, in float32, where bf16 units would round it.
struct exact_bf16 : bf16 {};
template <>
inline constexpr bool kSplitsPairs<exact_bf16> = true;
template <int Half>
inline vec load_half(const exact_bf16* p) {
  return load_half<Half>(static_cast<const bf16*>(p));
}
#endif

template <typename T>
struct Dot {
  using X = float;
  static constexpr int kHalves = 2;
#if defined(__AVX512F__)
  static constexpr int kMr = 8, kNr = 3, kFewRows = 6;  // 24 of 32 registers accumulate
#else
  static constexpr int kMr = 6, kNr = 2, kFewRows = 4;  // 12 of 16
#endif

  template <int Half, int MR, int NR>
  C2C_INLINE static inline void add(vec (&acc)[MR][NR], const X* x, const T* const* w, int64_t k) {
    vec wv[NR];
    unrolled<NR>([&](auto j) C2C_INLINE { wv[j] = held(load_half<Half>(w[j] + k)); });
    unrolled<MR>([&](auto i) C2C_INLINE {
      const vec xv = held(load(x + i * kLanes));
      unrolled<NR>([&](auto j) C2C_INLINE { acc[i][j] = fma(xv, wv[j], acc[i][j]); });
    });
  }

  // Row `i` of `rows`: kPair columns of it.
  static inline void pack(X* out, const float* in, int64_t i, int64_t rows) {
    X *first = out + i * kLanes, *second = first + rows * kLanes;
    for (int l = 0; l < kLanes; ++l) {
      first[l] = in[kSplitsPairs<T> ? 2 * l : l];
      second[l] = in[kSplitsPairs<T> ? 2 * l + 1 : kLanes + l];
    }
  }
};

#if defined(__AVX512BF16__)
template <>
struct Dot<bf16> {
  using X = bf16;
  static constexpr int kHalves = 1;
  static constexpr int kMr = 6, kNr = 4, kFewRows = 9;

  static inline __m512i read(const bf16* p) {
    __m512i value = _mm512_loadu_si512(p);
    asm("" : "+v"(value));  // as `held`
    return value;
  }

  template <int Half, int MR, int NR>
  C2C_INLINE static inline void add(vec (&acc)[MR][NR], const X* x, const bf16* const* w,
                                    int64_t k) {
    __m512i wv[NR];
    unrolled<NR>([&](auto j) C2C_INLINE { wv[j] = read(w[j] + k); });
    unrolled<MR>([&](auto i) C2C_INLINE {
      const __m512i xv = read(x + i * kPair);
      unrolled<NR>([&](auto j) C2C_INLINE {
        acc[i][j].v = _mm512_dpbf16_ps(acc[i][j].v, (__m512bh)xv, (__m512bh)wv[j]);
      });
    });
  }

  static inline void pack(X* out, const float* in, int64_t i, int64_t) {
    round_pair(out + i * kPair, load(in), load(in + kLanes));
  }
};
#endif

// What rows of x are packed as, to meet w of type T.
template <typename T>
using Factor = typename Dot<T>::X;

#if defined(__AVX512F__)
// Each step folds two vectors into one, in the way `sum` folds halves of one.
inline vec fold_256(vec x, vec y) {
  return {_mm512_add_ps(_mm512_shuffle_f32x4(x.v, y.v, 0x44),
                        _mm512_shuffle_f32x4(x.v, y.v, 0xee))};
}
inline vec fold_128(vec x, vec y) {
  return {_mm512_add_ps(_mm512_shuffle_f32x4(x.v, y.v, 0x88),
                        _mm512_shuffle_f32x4(x.v, y.v, 0xdd))};
}
inline vec fold_64(vec x, vec y) {
  return {_mm512_add_ps(_mm512_shuffle_ps(x.v, y.v, 0x44), _mm512_shuffle_ps(x.v, y.v, 0xee))};
}
inline vec fold_32(vec x, vec y) {
  return {_mm512_add_ps(_mm512_shuffle_ps(x.v, y.v, 0x88), _mm512_shuffle_ps(x.v, y.v, 0xdd))};
}

// Lane i is `sum(v[i])`, with its bits.
[[gnu::always_inline]] inline vec sum16(const vec* v) {
  vec four[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    four[i] = fold_128(fold_256(v[i], v[i + 4]), fold_256(v[i + 8], v[i + 12]));
  return fold_32(fold_64(four[0], four[1]), fold_64(four[2], four[3]));
}

// As `sum16`, for eight.
[[gnu::always_inline]] inline __m256 sum8(const vec* v) {
  const vec low = fold_128(fold_256(v[0], v[4]), fold_256(v[1], v[5]));
  const vec high = fold_128(fold_256(v[2], v[6]), fold_256(v[3], v[7]));
  const vec all = fold_64(low, high);  // [0 2 | 4 6 | 1 3 | 5 7], two lanes of each
  const vec sums = fold_32(all, all);
  const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 4, 12, 5, 13, 0, 0, 0, 0, 0, 0, 0, 0);
  return _mm512_castps512_ps256(_mm512_permutexvar_ps(order, sums.v));
}
#endif

// sums[i] = sum(v[i])
template <int N>
[[gnu::always_inline]] inline void sum_all(float* sums, const vec* v) {
  int i = 0;
#if defined(__AVX512F__)
#pragma GCC unroll 4
  for (; i + 16 <= N; i += 16) store(sums + i, sum16(v + i));
  if (i + 8 <= N) {
    _mm256_storeu_ps(sums + i, sum8(v + i));
    i += 8;
  }
#endif
#pragma GCC unroll 8
  for (; i < N; ++i) sums[i] = sum(v[i]);
}

}  // namespace c2c
