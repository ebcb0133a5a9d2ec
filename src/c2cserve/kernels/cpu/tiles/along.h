// As vectors.h, with a row of w at a time: memory is read in one sequence.
//
//   v[p] = columns 2 p and 2 p + 1 of 16 steps         1 KiB of a row of w, turned in registers
//   even = even + w[2 p] x[2 p]                        p = 0 .. 15, both from zero, 16 steps at once
//   odd  = odd + w[2 p + 1] x[2 p + 1]
//   parked[block of 16 steps][row of x][row of w] = even + odd
//
// When 16 rows of w are done, what is parked is turned. Then a vector is a step of 16 outputs, and
// their sums take the steps in order.
#pragma once
#include "vectors.h"

#if defined(C2C_TILE_VECTORS)
namespace c2c::tile_linear {

constexpr int kAlongRows = 4;           // of x, at most: registers
constexpr int64_t kAlongBytes = 2048;   // how far reads are announced

// x in the order in which `along` reads it: [block of 16 steps][row][pair][even, odd][step].
struct AlongX {
  const float* data;
  int64_t steps;
  int64_t blocks() const { return (steps + kTile - 1) / kTile; }
  int64_t in_block(int64_t block) const { return std::min<int64_t>(kTile, steps - block * kTile); }
};

inline AlongX pack_along(ThreadPool& pool, const LinearArgs& a) {
  AlongX x{nullptr, a.k / kStepColumns};
  constexpr int64_t kBlock = kTile * kStepColumns;
  float* out = pool.scratch(x.blocks() * a.m * kBlock);
  x.data = out;
  for (int64_t b = 0; b < x.blocks(); ++b)
    for (int64_t r = 0; r < a.m; ++r, out += kBlock)
      for (int64_t s = 0; s < kTile; ++s) {
        alignas(64) bf16 rounded[kStepColumns] = {};
        const float* in = a.x + r * a.x_stride + (b * kTile + s) * kStepColumns;
        if (s < x.in_block(b)) round_pair(rounded, load(in), load(in + kLanes));
        for (int c = 0; c < kStepColumns; ++c) out[c * kTile + s] = to_float(rounded[c]);
      }
  return x;
}

// 16 steps of a row of w, or `steps` of them, with R rows of x.
template <int R>
inline void along_block(const uint8_t* w, int64_t steps, const float* x, float* parked) {
  __m512i v[kTile];
#pragma GCC unroll 16
  for (int s = 0; s < kTile; ++s) prefetch(w + kAlongBytes + s * tiles::kLine);
  if (steps == kTile) {
#pragma GCC unroll 16
    for (int s = 0; s < kTile; ++s) v[s] = _mm512_loadu_si512(w + s * tiles::kLine);
  } else {
#pragma GCC unroll 16
    for (int s = 0; s < kTile; ++s)
      v[s] = _mm512_maskz_loadu_epi32(__mmask16(s < steps ? 0xffff : 0), w + s * tiles::kLine);
  }
  transpose16(v);
  const __m512i high = _mm512_set1_epi32(int(0xffff0000));
  vec even[R], odd[R];
  for (int r = 0; r < R; ++r) even[r] = odd[r] = zero();
#pragma GCC unroll 16
  for (int p = 0; p < kTile; ++p) {
    const vec first{_mm512_castsi512_ps(_mm512_slli_epi32(v[p], 16))};
    const vec second{_mm512_castsi512_ps(_mm512_and_si512(v[p], high))};
    for (int r = 0; r < R; ++r) {
      const float* factors = x + (r * kTile + p) * 2 * kTile;
      even[r] = fma(first, load(factors), even[r]);
      odd[r] = fma(second, load(factors + kTile), odd[r]);
    }
  }
  for (int r = 0; r < R; ++r) store(parked + r * kTile * kTile, add(even[r], odd[r]));
}

// Outputs [n, n1), whole strips of 16.
template <int R>
[[gnu::noinline]] void along(const LinearArgs& a, const AlongX& x, int64_t n, int64_t n1) {
  const FlushSubnormals session;
  const int64_t row_bytes = a.w_stride * int64_t(sizeof(bf16));
  constexpr int64_t kSquare = kTile * kTile;
  float* parked = Buffers::of_thread().parked.room(x.blocks() * R * kSquare);
  for (; n < n1; n += kTile) {
    for (int64_t i = 0; i < kTile; ++i) {
      const auto* w = static_cast<const uint8_t*>(a.w) + (n + i) * row_bytes;
      for (int64_t b = 0; b < x.blocks(); ++b)
        along_block<R>(w + b * kTile * tiles::kLine, x.in_block(b),
                       x.data + b * R * kTile * kStepColumns, parked + b * R * kSquare + i * kTile);
    }
    const Strip strip(a, n, n + kTile);
    for (int64_t r = 0; r < R; ++r) {
      vec sum = zero();
      for (int64_t b = 0; b < x.blocks(); ++b) {
        __m512i v[kTile];
        const float* square = parked + (b * R + r) * kSquare;
#pragma GCC unroll 16
        for (int i = 0; i < kTile; ++i) v[i] = _mm512_loadu_si512(square + i * kTile);
        transpose16(v);
        for (int64_t s = 0; s < x.in_block(b); ++s) sum = add(sum, {_mm512_castsi512_ps(v[s])});
      }
      store(a.out + r * a.out_stride + n, strip.biased ? add(sum, load(strip.bias)) : sum);
    }
  }
}

template <int R = 1>
inline void along_of(int64_t rows, const LinearArgs& a, const AlongX& x, int64_t n, int64_t n1) {
  if (rows == R) return along<R>(a, x, n, n1);
  if constexpr (R < kAlongRows) along_of<R + 1>(rows, a, x, n, n1);
}

}  // namespace c2c::tile_linear
#endif
