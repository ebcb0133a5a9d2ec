// Converting weights between dtypes, and measuring how fast this machine reads and multiplies.
#pragma once
#include <vector>

#include "simd.h"
#include "threads.h"

namespace c2c {

// A vector from any byte of a file.
template <typename T>
inline vec load_anywhere(const uint8_t* p) {
#if defined(__AVX2__) || defined(__AVX512F__)
  return load(reinterpret_cast<const T*>(p));  // one unaligned load
#else
  T lanes[kLanes];
  std::memcpy(lanes, p, sizeof(lanes));
  return load(lanes);
#endif
}

template <typename From, typename To>
void convert_typed(void* to, const void* from, int64_t n) {
  const auto* in = static_cast<const uint8_t*>(from);
  auto* out = static_cast<To*>(to);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    store(out + i, load_anywhere<From>(in + i * int64_t(sizeof(From))));
  for (; i < n; ++i) {
    From value;
    std::memcpy(&value, in + i * int64_t(sizeof(From)), sizeof(From));
    from_float(out[i], to_float(value));
  }
}

template <typename From>
void convert_from(void* to, Dtype to_type, const void* from, int64_t n) {
  switch (to_type) {
    case Dtype::f32: return convert_typed<From, float>(to, from, n);
    case Dtype::f16: return convert_typed<From, f16>(to, from, n);
    case Dtype::bf16: return convert_typed<From, bf16>(to, from, n);
  }
}

inline void convert(void* to, Dtype to_type, const void* from, Dtype from_type, int64_t n) {
  if (to_type == from_type) {
    std::memcpy(to, from, size_t(n) * (to_type == Dtype::f32 ? 4 : 2));
    return;
  }
  switch (from_type) {
    case Dtype::f32: return convert_from<float>(to, to_type, from, n);
    case Dtype::f16: return convert_from<f16>(to, to_type, from, n);
    case Dtype::bf16: return convert_from<bf16>(to, to_type, from, n);
  }
}

// Read `n` floats as fast as the cores can.
inline float read_all(ThreadPool& pool, const float* data, int64_t n) {
  std::vector<float> sums(size_t(pool.size()) * 16);  // a cache line each
  pool.run(pool.size(), [&](int part, int all) {
    constexpr int kStreams = 4, kLine = 16;  // floats
    vec acc[kStreams];
    for (auto& a : acc) a = zero();
    const int64_t step = kStreams * kLine;
    const int64_t begin = n * part / all / step * step, end = n * (part + 1) / all / step * step;
    const int64_t length = (end - begin) / kStreams / kLine * kLine;
    for (int64_t i = 0; i < length; i += kLine)
      for (int j = 0; j < kStreams; ++j) {
        const float* at = data + begin + j * length + i;
        prefetch(at + 256);
        for (int k = 0; k < kLine; k += kLanes) acc[j] = add(acc[j], load(at + k));
      }
    for (auto& a : acc) sums[size_t(part) * 16] += sum(a);
  });
  return sums[0];
}

// `rounds` rounds of 12 independent multiply-adds of whole vectors on every thread; returns how
// many floating-point operations that was.
inline double multiply_all(ThreadPool& pool, int64_t rounds) {
  std::vector<float> sums(size_t(pool.size()) * 16);
  pool.run(pool.size(), [&](int part, int) {
    vec acc[12];
    for (auto& a : acc) a = zero();
    for (int64_t i = 0; i < rounds; ++i)
      for (auto& a : acc) a = held(fma(a, splat(0.5f), splat(0.25f)));
    for (auto& a : acc) sums[size_t(part) * 16] += sum(a);
  });
  return 2.0 * 12 * kLanes * double(rounds) * pool.size();
}

}  // namespace c2c
