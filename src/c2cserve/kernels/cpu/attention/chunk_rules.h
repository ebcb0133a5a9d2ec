// What every way to attend in chunks shares: their size, and how scores become weights.
//
// Weights are powers of two of the scores above a row's peak. The peak rises only when a chunk has
// a score above it by more than `kSlack`. So it seldom does, and what a row has gathered is seldom
// scaled anew; no weight exceeds 2^kSlack. The rule looks at nothing but the row.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "args.h"
#include "../dot.h"

namespace c2c::chunks {

constexpr int kBlocks = 4;
constexpr int kKeys = kBlocks * kBlock;
constexpr int kRows = 16;   // that go through a chunk together
constexpr int kWidth = 32;  // q is padded with zeros to a multiple of it

constexpr float kSlack = 8.0f;
constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;

// 2^x, relative error < 3e-6 (weights are rounded to 2^-9); 0 for -infinity, and NaN for NaN.
inline vec power_of_two(vec x) {
#if defined(__AVX512DQ__)
  const vec r = {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
  vec p = splat(1.342668571e-02f);
  p = fma(p, r, splat(5.224247277e-02f));
  p = fma(p, r, splat(2.412802130e-01f));
  p = fma(p, r, splat(6.930448413e-01f));
  p = fma(p, r, splat(1.0f));
  return {_mm512_scalef_ps(p.v, x.v)};
#else
  float lanes[kLanes];
  store(lanes, x);
  for (float& lane : lanes) lane = lane < -126.0f ? 0.0f : std::exp2(lane);
  return load(lanes);
#endif
}
inline float power_of_two1(float x) {
  float lanes[kLanes];
  store(lanes, power_of_two(splat(x)));
  return lanes[0];
}

// Bits of the lanes where a > b.
inline uint32_t above(vec a, vec b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ);
#else
  float x[kLanes], y[kLanes];
  store(x, a);
  store(y, b);
  uint32_t bits = 0;
  for (int l = 0; l < kLanes; ++l) bits |= uint32_t(x[l] > y[l]) << l;
  return bits;
#endif
}

// Of 16 pairs, bit 2 i of a mask is the first of the i-th pair, and bit 2 i + 1 the second.
constexpr uint32_t kFirsts = 0x55555555, kSeconds = 0xaaaaaaaa;
constexpr uint32_t first_pairs(int64_t count) {
  return count < kWidth / 2 ? (uint32_t(1) << 2 * count) - 1 : ~uint32_t(0);
}
// Of pairs of a key and the next one: those whose keys lie in [from, to).
constexpr uint32_t pairs_seen(int64_t key, int64_t from, int64_t to) {
  return (key >= from && key < to ? kFirsts : 0) |
         (key + 1 >= from && key + 1 < to ? kSeconds : 0);
}

#if defined(__AVX512F__)
// 16 pairs, those of the mask; others are zeros, and not read.
inline __m512i load_pairs(const bf16* p, uint32_t mask) {
  return _mm512_maskz_loadu_epi16(__mmask32(mask), p);
}
#endif
inline void copy_pairs(bf16* out, const bf16* p, uint32_t mask) {
#if defined(__AVX512F__)
  _mm512_storeu_si512(out, load_pairs(p, mask));
#else
  for (int i = 0; i < kWidth; ++i) out[i] = mask >> i & 1 ? p[i] : bf16{0};
#endif
}

}  // namespace c2c::chunks
