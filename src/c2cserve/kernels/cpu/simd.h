// A vector of floats for whatever this translation unit is compiled for: AVX-512, AVX2, or GCC's
// portable vectors (which become NEON on aarch64). Every kernel is written once over this header.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace c2c {

// Into the first-level cache, and no further than needed. GCC sees no effect in a function that
// does only this: unless it is always inlined, its calls may be dropped.
[[gnu::always_inline]] inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
// Into the second-level cache: what is needed after more than the first one holds.
[[gnu::always_inline]] inline void prefetch_early(const void* p) { __builtin_prefetch(p, 0, 2); }

// A line that will be written, and that other cores may hold.
[[gnu::always_inline]] inline void prefetch_to_write(const void* p) { __builtin_prefetch(p, 1, 3); }

enum class Dtype : int { f32 = 0, f16 = 1, bf16 = 2 };

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

inline float to_float(float v) { return v; }
inline float to_float(bf16 v) {
  uint32_t bits = uint32_t(v.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
inline float to_float(f16 v) {
  // Subnormal halves are scaled into place by one multiplication; infinities and NaNs keep theirs.
  uint32_t sign = uint32_t(v.bits & 0x8000) << 16, rest = v.bits & 0x7fff, bits;
  if (rest >= 0x7c00) {
    bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
  } else {
    uint32_t magnitude = rest << 13;
    float scaled;
    std::memcpy(&scaled, &magnitude, 4);
    scaled *= 0x1p112f;
    std::memcpy(&magnitude, &scaled, 4);
    bits = sign | magnitude;
  }
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline void from_float(float& out, float v) { out = v; }
inline void from_float(bf16& out, float v) {  // round to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
  out.bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);  // no branch: vectorizes
}
inline void from_float(f16& out, float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {
    out.bits = uint16_t(sign | 0x7e00);
  } else if (magnitude >= 0x477ff000) {  // rounds to 65536 or beyond
    out.bits = uint16_t(sign | 0x7c00);
  } else if (magnitude < 0x38800000) {  // subnormal half: let the float adder round
    float scaled;
    std::memcpy(&scaled, &magnitude, 4);
    scaled += 0.5f;
    std::memcpy(&magnitude, &scaled, 4);
    out.bits = uint16_t(sign | (magnitude - 0x3f000000));
  } else {
    uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23);
    out.bits = uint16_t(sign | rounded >> 13);
  }
}

#if defined(__AVX512F__)
constexpr int kLanes = 16;
struct vec {
  __m512 v;
};
inline vec zero() { return {_mm512_setzero_ps()}; }
inline vec splat(float x) { return {_mm512_set1_ps(x)}; }
inline vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline vec load(const bf16* p) {
  __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
inline vec load(const f16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store(float* p, vec a) { _mm512_storeu_ps(p, a.v); }
inline void store(f16* p, vec a) {
  __m256i half = _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
}
inline vec fma(vec a, vec b, vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline vec add(vec a, vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline vec sub(vec a, vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline vec mul(vec a, vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline vec div(vec a, vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline vec max(vec a, vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline vec min(vec a, vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline vec round(vec a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline vec pow2(vec a) {  // 2^a for integral a in [-126, 127]
  __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(a.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}
inline vec select(uint32_t bits, vec a, vec b) {  // a where the lane's bit is set, else b
  return {_mm512_mask_blend_ps(__mmask16(bits), b.v, a.v)};
}
#elif defined(__AVX2__)
constexpr int kLanes = 8;
struct vec {
  __m256 v;
};
inline vec zero() { return {_mm256_setzero_ps()}; }
inline vec splat(float x) { return {_mm256_set1_ps(x)}; }
inline vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline vec load(const bf16* p) {
  __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16))};
}
inline vec load(const f16* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline void store(float* p, vec a) { _mm256_storeu_ps(p, a.v); }
inline void store(f16* p, vec a) {
  __m128i half = _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), half);
}
inline vec fma(vec a, vec b, vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline vec add(vec a, vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline vec sub(vec a, vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline vec mul(vec a, vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline vec div(vec a, vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline vec max(vec a, vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline vec min(vec a, vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline vec round(vec a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline vec pow2(vec a) {
  __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(a.v), _mm256_set1_epi32(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(e, 23))};
}
inline vec select(uint32_t bits, vec a, vec b) {  // a where the lane's bit is set, else b
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  __m256i set = _mm256_and_si256(_mm256_set1_epi32(int(bits)), lane);
  return {_mm256_blendv_ps(b.v, a.v, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane)))};
}
#else
constexpr int kLanes = 8;
typedef float raw8 __attribute__((vector_size(32)));
typedef int32_t int8x __attribute__((vector_size(32)));
struct vec {
  raw8 v;
};
inline vec zero() { return {raw8{}}; }
inline vec splat(float x) { return {raw8{x, x, x, x, x, x, x, x}}; }
template <typename T>
inline vec load(const T* p) {
  vec out;
  for (int i = 0; i < kLanes; ++i) out.v[i] = to_float(p[i]);
  return out;
}
inline void store(float* p, vec a) { std::memcpy(p, &a.v, sizeof(a.v)); }
inline void store(f16* p, vec a) {
  for (int i = 0; i < kLanes; ++i) from_float(p[i], a.v[i]);
}
inline vec fma(vec a, vec b, vec c) {
#if defined(__FP_FAST_FMAF)  // contraction is off everywhere, so a fused add is asked for by name
  vec out;
  for (int i = 0; i < kLanes; ++i) out.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return out;
#else
  return {a.v * b.v + c.v};
#endif
}
inline vec add(vec a, vec b) { return {a.v + b.v}; }
inline vec sub(vec a, vec b) { return {a.v - b.v}; }
inline vec mul(vec a, vec b) { return {a.v * b.v}; }
inline vec div(vec a, vec b) { return {a.v / b.v}; }
inline vec max(vec a, vec b) { return {a.v > b.v ? a.v : b.v}; }
inline vec min(vec a, vec b) { return {a.v < b.v ? a.v : b.v}; }
inline vec round(vec a) {
  vec out;
  for (int i = 0; i < kLanes; ++i) out.v[i] = __builtin_rintf(a.v[i]);
  return out;
}
inline vec pow2(vec a) {
  int8x e = (__builtin_convertvector(a.v, int8x) + 127) << 23;
  vec out;
  std::memcpy(&out.v, &e, sizeof(e));
  return out;
}
inline vec select(uint32_t bits, vec a, vec b) {  // a where the lane's bit is set, else b
  const int8x lane = {1, 2, 4, 8, 16, 32, 64, 128};
  return {(lane & int32_t(bits)) != 0 ? a.v : b.v};
}
#endif


// As `from_float` rounds, all lanes at once.
inline void store(bf16* p, vec a) {
#if defined(__AVX512F__)
  __m512i bits = _mm512_castps_si512(a.v), top = _mm512_srli_epi32(bits, 16);
  __m512i half = _mm512_add_epi32(_mm512_and_si512(top, _mm512_set1_epi32(1)),
                                  _mm512_set1_epi32(0x7fff));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, top, _mm512_set1_epi32(0x40));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
#elif defined(__AVX2__)
  __m256i bits = _mm256_castps_si256(a.v), top = _mm256_srli_epi32(bits, 16);
  __m256i half = _mm256_add_epi32(_mm256_and_si256(top, _mm256_set1_epi32(1)),
                                  _mm256_set1_epi32(0x7fff));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(top, _mm256_set1_epi32(0x40)), nan);
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
#else
  for (int i = 0; i < kLanes; ++i) from_float(p[i], a.v[i]);
#endif
}

// A pair of vectors of neighbouring elements, one at a time, in the order that is cheapest for the
// type. Elements are in sequence, except for bf16: first all even and then all odd ones. There an
// element becomes a float by one shift or one mask, with no shuffle. The other operand must have
// the same order (`kSplitsPairs`).
template <typename T>
constexpr bool kSplitsPairs = false;
template <>
inline constexpr bool kSplitsPairs<bf16> = true;

template <int Half, typename T>
inline vec load_half(const T* p) {
  return load(p + Half * kLanes);
}
template <int Half>
inline vec load_half(const bf16* p) {
#if defined(__AVX512F__)
  __m512i raw = _mm512_loadu_si512(p), high = _mm512_set1_epi32(int(0xffff0000));
  raw = Half ? _mm512_and_si512(raw, high) : _mm512_slli_epi32(raw, 16);
  return {_mm512_castsi512_ps(raw)};
#elif defined(__AVX2__)
  __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  __m256i high = _mm256_set1_epi32(int(0xffff0000));
  raw = Half ? _mm256_and_si256(raw, high) : _mm256_slli_epi32(raw, 16);
  return {_mm256_castsi256_ps(raw)};
#else
  vec out;
  for (int i = 0; i < kLanes; ++i) out.v[i] = to_float(p[2 * i + Half]);
  return out;
#endif
}

// f(0), ..., f(N - 1) with constants. Accumulators in an array stay in registers only if compilers
// see constant indices from the start; they unroll loops too late for it.
#define C2C_INLINE __attribute__((always_inline))
template <typename F, int... I>
C2C_INLINE inline void unrolled(const F& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>()), ...);
}
template <int N, typename F>
C2C_INLINE inline void unrolled(const F& f) {
  unrolled(f, std::make_integer_sequence<int, N>());
}

// A value that several multiplications share: without this, compilers fold its load into each of
// them, and the load ports become the limit.
inline vec held(vec a) {
#if defined(__AVX512F__)
  asm("" : "+v"(a.v));
#elif defined(__AVX2__)
  asm("" : "+x"(a.v));
#endif
  return a;
}

// The lanes are added in one fixed tree: halves onto each other, down to one lane. This is needed
// for results that do not depend on what else is in the batch.
#if defined(__AVX2__) || defined(__AVX512F__)
inline float sum8(__m256 v) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#endif
inline float sum(vec a) {
#if defined(__AVX512F__)
  __m256 low = _mm512_castps512_ps256(a.v), high = _mm512_extractf32x8_ps(a.v, 1);
  return sum8(_mm256_add_ps(low, high));
#elif defined(__AVX2__)
  return sum8(a.v);
#else
  float lanes[kLanes];
  store(lanes, a);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
#endif
}
inline float largest(vec a) {
#if defined(__AVX2__) || defined(__AVX512F__)
#if defined(__AVX512F__)
  __m256 v = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
#else
  __m256 v = a.v;
#endif
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
  float best = a.v[0];
  for (int i = 1; i < kLanes; ++i) best = a.v[i] > best ? a.v[i] : best;
  return best;
#endif
}

// The first `n` < kLanes elements, zeros behind them.
template <typename T>
inline vec load_tail(const T* p, int n) {
  T lanes[kLanes] = {};
  std::memcpy(lanes, p, size_t(n) * sizeof(T));
  return load(lanes);
}
inline void store_tail(float* p, vec a, int n) {
  float lanes[kLanes];
  store(lanes, a);
  std::memcpy(p, lanes, size_t(n) * sizeof(float));
}

// e^x by range reduction to [-ln2/2, ln2/2] and a degree-6 polynomial; relative error < 3e-7, the
// smallest normal float below -87, no overflow above 88. `max` and `min` give their second operand
// when one is a NaN, so a NaN comes out as a NaN.
inline vec exp(vec x) {
  x = min(splat(88.0f), max(splat(-87.3365448f), x));
  vec n = round(mul(x, splat(1.44269504f)));
  vec r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), splat(1.0f));
  return mul(p, pow2(n));
}
inline float exp1(float x) {
  float lanes[kLanes];
  store(lanes, exp(splat(x)));
  return lanes[0];
}

}  // namespace c2c
