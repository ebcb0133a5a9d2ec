// out[M, N] = x[M, K] w[N, K]^T (+ bias), w row-major in the pool, read in place.
//
// Dot-product form: each output has one vector accumulator that walks K in order, then one fixed
// horizontal sum. Blocking only decides which outputs are worked on together, so an output's bits
// do not depend on M, on the blocking or on the threads.
//
//        K ->                      for a block of rows of x (stays in L2)
//   w   [n0 ########]                for NR rows of w (stay in L1)
//   NR  [n1 ########]                  for MR rows of x: MR x NR accumulators in registers
//        x0..x_MR each meet both
#pragma once
#include "simd.h"
#include "threads.h"

namespace c2c {

struct LinearArgs {
  float* out;
  int64_t out_stride;
  const float* x;
  int64_t x_stride;
  const void* w;
  int64_t w_stride;
  const float* bias;  // [N] or null
  int64_t m, n, k;
};

#if defined(__AVX512F__)
constexpr int kMr = 6, kNr = 4;
#else
constexpr int kMr = 4, kNr = 2;
#endif
constexpr int kDecodeNr = 4;      // rows of w together when there is one row of x
constexpr int64_t kRowBlock = 32;  // rows of x that meet a row of w before it leaves the cache

template <typename T, int MR, int NR>
inline void tile(const LinearArgs& a, int64_t m, int64_t n) {
  vec acc[MR][NR];
  for (int i = 0; i < MR; ++i)
    for (int j = 0; j < NR; ++j) acc[i][j] = zero();
  const float* x[MR];
  const T* w[NR];
  for (int i = 0; i < MR; ++i) x[i] = a.x + (m + i) * a.x_stride;
  for (int j = 0; j < NR; ++j) w[j] = static_cast<const T*>(a.w) + (n + j) * a.w_stride;
  int64_t k = 0;
  for (; k + kLanes <= a.k; k += kLanes) {
    vec wv[NR];
    for (int j = 0; j < NR; ++j) {
      wv[j] = load(w[j] + k);
      // The hardware prefetcher stops at page borders; a row is a few pages.
      if (MR == 1) __builtin_prefetch(reinterpret_cast<const char*>(w[j] + k) + 1024);
    }
    for (int i = 0; i < MR; ++i) {
      vec xv = load(x[i] + k);
      for (int j = 0; j < NR; ++j) acc[i][j] = fma(xv, wv[j], acc[i][j]);
    }
  }
  if (int rest = int(a.k - k); rest > 0) {
    for (int i = 0; i < MR; ++i) {
      vec xv = load_tail(x[i] + k, rest);
      for (int j = 0; j < NR; ++j) acc[i][j] = fma(xv, load_tail(w[j] + k, rest), acc[i][j]);
    }
  }
  for (int i = 0; i < MR; ++i)
    for (int j = 0; j < NR; ++j) {
      float value = sum(acc[i][j]);
      a.out[(m + i) * a.out_stride + n + j] = a.bias ? value + a.bias[n + j] : value;
    }
}

template <typename T, int NR>
inline void rows(const LinearArgs& a, int64_t m0, int64_t m1, int64_t n) {
  int64_t m = m0;
  for (; m + kMr <= m1; m += kMr) tile<T, kMr, NR>(a, m, n);
#if defined(__AVX512F__)
  for (; m + 3 <= m1; m += 3) tile<T, 3, NR>(a, m, n);
#endif
  for (; m + 2 <= m1; m += 2) tile<T, 2, NR>(a, m, n);
  for (; m < m1; ++m) tile<T, 1, NR>(a, m, n);
}

// Columns [n0, n1) of the output.
template <typename T>
void linear_columns(const LinearArgs& a, int64_t n0, int64_t n1) {
  if (a.m == 1) {
    int64_t n = n0;
    for (; n + kDecodeNr <= n1; n += kDecodeNr) tile<T, 1, kDecodeNr>(a, 0, n);
    for (; n < n1; ++n) tile<T, 1, 1>(a, 0, n);
    return;
  }
  for (int64_t m = 0; m < a.m; m += kRowBlock) {
    int64_t m1 = m + kRowBlock < a.m ? m + kRowBlock : a.m, n = n0;
    for (; n + kNr <= n1; n += kNr) rows<T, kNr>(a, m, m1, n);
    for (; n < n1; ++n) rows<T, 1>(a, m, m1, n);
  }
}

template <typename T>
void linear_typed(ThreadPool& pool, const LinearArgs& a) {
  // Waking a helper costs a few microseconds: worth it from about 100k multiply-adds on.
  int parts = a.m * a.n * a.k < 100'000 ? 1 : pool.size();
  if (parts > a.n) parts = int(a.n);
  pool.run(parts, [&](int part, int all) {
    int64_t per = ((a.n + all - 1) / all + 15) / 16 * 16;  // whole cache lines of the output
    int64_t n0 = per * part, n1 = n0 + per < a.n ? n0 + per : a.n;
    if (n0 < n1) linear_columns<T>(a, n0, n1);
  });
}

inline void linear(ThreadPool& pool, const LinearArgs& a, Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return linear_typed<float>(pool, a);
    case Dtype::f16: return linear_typed<f16>(pool, a);
    case Dtype::bf16: return linear_typed<bf16>(pool, a);
  }
}

}  // namespace c2c
