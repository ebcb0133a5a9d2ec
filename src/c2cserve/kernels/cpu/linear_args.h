// What `linear` multiplies, whichever units do it.
#pragma once
#include "simd.h"

namespace c2c {

struct LinearArgs {
  float* out;
  int64_t out_stride;
  const float* x;
  int64_t x_stride;
  const void* w;
  int64_t w_stride;
  const void* bias;  // [N] or null
  Dtype bias_type;
  int64_t m, n, k;
  // w and its bias have 2 n rows, gates before ups: out = silu(gate) * up.
  bool gated = false;
  // On tiles: x and out in bf16 as tiles of x are loaded, instead of rows.
  const bf16* tiled_x = nullptr;
  bf16* tiled_out = nullptr;
};

constexpr int64_t kLine = 64;  // bytes of a cache line
constexpr int64_t kSets = 64;  // of the first-level cache

// Whether rows that lie so many bytes apart share one set of it, or two at most.
inline bool share_set(int64_t bytes) { return bytes / kLine % kSets == 0; }
inline bool share_sets(int64_t bytes) { return bytes / kLine % (kSets / 2) == 0; }

// The element for row `n` of w.
inline float bias_at(const LinearArgs& a, int64_t n) {
  switch (a.bias_type) {
    case Dtype::f32: return static_cast<const float*>(a.bias)[n];
    case Dtype::f16: return to_float(static_cast<const f16*>(a.bias)[n]);
    case Dtype::bf16: return to_float(static_cast<const bf16*>(a.bias)[n]);
  }
  return 0.0f;
}

}  // namespace c2c
