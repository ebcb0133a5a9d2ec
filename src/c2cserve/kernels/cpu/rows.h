// Operators that work row by row, over the pool: embedding, norms, activation.
#pragma once
#include "rowwise.h"
#include "threads.h"

namespace c2c {

// The first id that lies outside of the table, or -1: nothing is written then.
inline int64_t embed(ThreadPool& pool, float* out, const void* table, Dtype dtype, int64_t vocab,
                     const int32_t* ids, int64_t tokens, int64_t hidden) {
  for (int64_t t = 0; t < tokens; ++t)
    if (ids[t] < 0 || ids[t] >= vocab) return t;
  pool.rows(tokens, hidden, [=](int64_t t) {
    widen_row(out + t * hidden, table, dtype, ids[t], hidden);
  });
  return -1;
}

inline void rms_norm(ThreadPool& pool, float* out, const float* x, const float* weight, float eps,
                     int64_t tokens, int64_t hidden) {
  pool.rows(tokens, hidden, [=](int64_t t) {
    rms_norm_row(out + t * hidden, x + t * hidden, weight, eps, hidden);
  });
}

inline void add(ThreadPool& pool, float* into, const float* from, int64_t tokens, int64_t hidden) {
  pool.rows(tokens, hidden,
            [=](int64_t t) { add_row(into + t * hidden, from + t * hidden, hidden); });
}

// residual += x, then out = norm(residual)
inline void add_rms_norm(ThreadPool& pool, float* out, const float* x, float* residual,
                         const float* weight, float eps, int64_t tokens, int64_t hidden) {
  pool.rows(tokens, 2 * hidden, [=](int64_t t) {
    add_row(residual + t * hidden, x + t * hidden, hidden);
    rms_norm_row(out + t * hidden, residual + t * hidden, weight, eps, hidden);
  });
}

// gate_up: [tokens, 2 inner], gate before up.
inline void silu_mul(ThreadPool& pool, float* out, const float* gate_up, int64_t tokens,
                     int64_t inner) {
  pool.rows(tokens, 8 * inner, [=](int64_t t) {
    const float* row = gate_up + t * 2 * inner;
    silu_mul_row(out + t * inner, row, row + inner, inner);
  });
}

}  // namespace c2c
