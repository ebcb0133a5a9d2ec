// Operators on single rows: embedding, norms, rotary embedding, activation.
#pragma once
#include <cmath>

#include "simd.h"

namespace c2c {

template <typename T>
inline void widen(float* out, const T* in, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(in + i));
  for (; i < n; ++i) out[i] = to_float(in[i]);
}

template <typename T>
inline void narrow(T* out, const float* in, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(in + i));
  for (; i < n; ++i) from_float(out[i], in[i]);
}

inline void widen_row(float* out, const void* table, Dtype dtype, int64_t row, int64_t n) {
  switch (dtype) {
    case Dtype::f32: return widen(out, static_cast<const float*>(table) + row * n, n);
    case Dtype::f16: return widen(out, static_cast<const f16*>(table) + row * n, n);
    case Dtype::bf16: return widen(out, static_cast<const bf16*>(table) + row * n, n);
  }
}

// 1 / rms(in)
inline float rms_scale(const float* in, float eps, int64_t n) {
  vec squares = zero();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    vec v = load(in + i);
    squares = fma(v, v, squares);
  }
  if (i < n) {
    vec v = load_tail(in + i, int(n - i));
    squares = fma(v, v, squares);
  }
  return 1.0f / std::sqrt(sum(squares) / float(n) + eps);
}

// out = in / rms(in) * weight; in and out may be the same.
inline void rms_norm_row(float* out, const float* in, const float* weight, float eps, int64_t n) {
  const vec scale = splat(rms_scale(in, eps, n));
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    store(out + i, mul(mul(load(in + i), scale), load(weight + i)));
  if (int rest = int(n - i); rest > 0) {
    vec v = mul(load_tail(in + i, rest), scale);
    store_tail(out + i, mul(v, load_tail(weight + i, rest)), rest);
  }
}

inline void add_row(float* into, const float* from, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(into + i, add(load(into + i), load(from + i)));
  for (; i < n; ++i) into[i] += from[i];
}

// Rotate pairs (i, i + d/2) of one head by the angles of its position.
inline void rope_head(float* head, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    float a = head[i], b = head[i + half];
    head[i] = a * cos[i] - b * sin[i];
    head[i + half] = b * cos[i] + a * sin[i];
  }
}

// silu(gate) * up
inline vec silu_mul(vec gate, vec up) {
  return mul(div(gate, add(splat(1.0f), exp(sub(zero(), gate)))), up);
}

// out[i] = silu(gate[i]) * up[i]
inline void silu_mul_row(float* out, const float* gate, const float* up, int64_t n) {
  int64_t i = 0;
  for (; i < n; i += kLanes) {
    int rest = n - i < kLanes ? int(n - i) : kLanes;
    vec g = rest == kLanes ? load(gate + i) : load_tail(gate + i, rest);
    vec u = rest == kLanes ? load(up + i) : load_tail(up + i, rest);
    vec y = silu_mul(g, u);
    if (rest == kLanes)
      store(out + i, y);
    else
      store_tail(out + i, y, rest);
  }
}

}  // namespace c2c
