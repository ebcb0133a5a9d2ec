// What a tile instruction sums, by AVX-512: the same numbers in the same order, with the same bits.
//
//   v[p] = columns 2 p and 2 p + 1 of 16 outputs       16 rows of w, turned in registers
//   even = even + w[2 p] x[2 p]                        p = 0 .. 15, both from zero
//   odd  = odd + w[2 p + 1] x[2 p + 1]
//   sum  = sum + (even + odd)
//
// TDPBF16PS is defined so (Intel's Software Developer's Manual): float32 multiply-adds rounded to
// nearest even, subnormal numbers taken for zeros and flushed to them. VDPBF16PS adds an odd column
// and then an even one to one sum, and has other bits. So the units for float32 are used.
#pragma once
#include "strips.h"

#if defined(C2C_TILES) && defined(__AVX512F__)
#define C2C_TILE_VECTORS 1
namespace c2c::tile_linear {

constexpr int kVectorRows = 8;  // of x, at most

// The calling thread rounds and flushes as tiles do.
class FlushSubnormals {
 public:
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(kMasked | kFlush | kZeros); }
  ~FlushSubnormals() { _mm_setcsr(before_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  static constexpr unsigned kMasked = 0x1f80, kFlush = 0x8000, kZeros = 0x40;
  unsigned before_;
};

// 16 outputs for R rows of x, which is packed by `pack_rows`.
template <int R>
class VectorUnit {
 public:
  static constexpr int64_t kRows = kTile;

  explicit VectorUnit(const float* x) : x_(x) {
    for (vec& sum : sums_) sum = zero();
  }

  void step(const uint8_t* w, int64_t row_bytes) {
    __m512i v[kTile];
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) v[i] = _mm512_loadu_si512(w + i * row_bytes);
    transpose16(v);
    const __m512i high = _mm512_set1_epi32(int(0xffff0000));
    vec even[R], odd[R];
    for (int r = 0; r < R; ++r) even[r] = odd[r] = zero();
#pragma GCC unroll 16
    for (int p = 0; p < kTile; ++p) {
      const vec first{_mm512_castsi512_ps(_mm512_slli_epi32(v[p], 16))};
      const vec second{_mm512_castsi512_ps(_mm512_and_si512(v[p], high))};
      for (int r = 0; r < R; ++r) {
        even[r] = fma(first, splat(x_[(p * R + r) * 2]), even[r]);
        odd[r] = fma(second, splat(x_[(p * R + r) * 2 + 1]), odd[r]);
      }
    }
    for (int r = 0; r < R; ++r) sums_[r] = add(sums_[r], add(even[r], odd[r]));
    x_ += kStepColumns * R;
  }

  void end(float* sums) {
    for (int r = 0; r < R; ++r) store(sums + r * kTile, sums_[r]);
  }

 private:
  const float* x_;
  vec sums_[R];
};

// x as `VectorUnit` reads it: [step][pair][row][2], rounded to bf16 and widened again.
inline const float* pack_rows(ThreadPool& pool, const LinearArgs& a) {
  float* out = pool.scratch(a.m * a.k);
  for (int64_t k = 0; k < a.k; k += kStepColumns)
    for (int64_t r = 0; r < a.m; ++r) {
      alignas(64) bf16 rounded[kStepColumns];
      const float* in = a.x + r * a.x_stride + k;
      round_pair(rounded, load(in), load(in + kLanes));
      for (int c = 0; c < kStepColumns; ++c)
        out[(k + c / 2 * 2) * a.m + 2 * r + c % 2] = to_float(rounded[c]);
    }
  return out;
}

}  // namespace c2c::tile_linear
#endif
