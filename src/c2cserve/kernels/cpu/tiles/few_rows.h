// `linear` on tiles for up to 32 rows of x: w is read in place, at the speed of memory.
//
//               step: 64 bytes of each row
//   strip  row  0 [#####################|.....................]   a segment is read by steps,
//   of 16       1 [#####################|.....................]   down all rows and then along them;
//   outputs    .. [#####################|.....................]   meanwhile the next one is
//              15 [#####################|.....................]   announced, row by row
//                  segment: 1 KiB of each row at most
//
// Tiles read rows that lie apart, a line of each at a time. A processor's own prefetching follows
// some 16 or 32 sequences: strips of 64 outputs were read at half of the memory's speed. Where rows
// lie a power of two apart it fails, too. So the next segment is announced row by row. It lies in
// the second-level cache when its turn comes.
#pragma once
#include "strips.h"
#include "vectors.h"

#if defined(C2C_TILES)
namespace c2c {

// How up to 16 rows are multiplied. Every way gives the same bits, so that measuring decides.
enum class FewRows : int {
  chosen = 0,
  vectors = 1,      // 16 outputs at a time, announced
  tiles = 2,        // the same on tiles
  tiles_near = 3,   // announced within the row only
  tiles_plain = 4,  // not announced
  tiles_wide = 5,   // 32 outputs at a time, announced
};

namespace tile_linear {

constexpr FewRows kFewRows = FewRows::tiles;
constexpr int64_t kSegmentSteps = 16;  // of 64 bytes of a row
constexpr int64_t kNearBytes = 512;    // how far a row's reads are announced to the first level

// What is announced: nothing, what comes soon in the same rows, or the next segment, too.
enum class Ahead { nothing, near, segment };

// What is read of w in place: a strip of rows, and the strip after it, or null.
struct InPlace {
  const uint8_t* at;
  int64_t row_bytes, steps;
  const uint8_t* after;
};

// All of a strip through `unit`, which multiplies Unit::kRows rows of w at a time.
template <Ahead A, typename Unit>
inline void walk_in_place(Unit& unit, const InPlace& w) {
  const int64_t segments = (w.steps + kSegmentSteps - 1) / kSegmentSteps;
  const auto cut = [&](int64_t segment) { return w.steps * segment / segments; };
  for (int64_t s = 0; s < segments; ++s) {
    const int64_t end = cut(s + 1);
    const bool last = s + 1 == segments;
    const uint8_t* next = last ? w.after : w.at + end * tiles::kLine;
    Announcer upcoming(next, w.row_bytes, Unit::kRows, last ? cut(1) : cut(s + 2) - end);
    for (int64_t k = cut(s); k < end; ++k) {
      const uint8_t* at = w.at + k * tiles::kLine;
      if (A == Ahead::segment) upcoming.announce(Unit::kRows);
      if (A != Ahead::nothing)
        for (int64_t r = 0; r < Unit::kRows; ++r) prefetch(at + kNearBytes + r * w.row_bytes);
      unit.step(at, w.row_bytes);
    }
    if (A == Ahead::segment) upcoming.announce(upcoming.left());
  }
}

// A strip of NA x 16 outputs for NB x 16 rows of x.
template <int NA, int NB>
class TileUnit {
 public:
  static constexpr int64_t kRows = NA * kTile;

  explicit TileUnit(const TiledX& x) : line_(4 * x.columns), hop_(x.step_size()) {
    for (int b = 0; b < NB; ++b) x_[b] = x.tile(b);
    Chain<NA, NB>::begin(nullptr);
  }
  void step(const uint8_t* w, int64_t row_bytes) {
    Chain<NA, NB>::step(w, {w, row_bytes, kTile * row_bytes, tiles::kLine}, x_, line_);
    for (int b = 0; b < NB; ++b) x_[b] += hop_;
  }
  void end(float* sums) { Chain<NA, NB>::end(sums); }

 private:
  const bf16* x_[NB];
  int64_t line_, hop_;
};

// Outputs [n, n1) by whole strips of NA tiles; returns where they end.
template <int NA, int NB, Ahead A = Ahead::segment>
int64_t strips_in_place(const LinearArgs& a, const TiledX& x, int64_t n, int64_t n1,
                        Buffers& buffers) {
  constexpr int64_t kOutputs = NA * kTile;
  const int64_t row_bytes = a.w_stride * int64_t(sizeof(bf16));
  for (; n + kOutputs <= n1; n += kOutputs) {
    const auto* w = static_cast<const uint8_t*>(a.w) + n * row_bytes;
    const bool more = n + 2 * kOutputs <= n1;
    TileUnit<NA, NB> unit(x);
    walk_in_place<A>(unit, {w, row_bytes, x.steps, more ? w + kOutputs * row_bytes : nullptr});
    unit.end(buffers.sums);
    write_strip<NA, NB>(a, Strip(a, n, n + kOutputs), buffers.sums, 0);
  }
  return n;
}

// Outputs [n, n1) by whole tiles; returns where they end.
inline int64_t tiles_in_place(const LinearArgs& a, const TiledX& x, int64_t n, int64_t n1,
                              FewRows way, Buffers& buffers) {
  if (a.m > kTile) {
    n = strips_in_place<2, 2>(a, x, n, n1, buffers);
    return strips_in_place<1, 2>(a, x, n, n1, buffers);
  }
  if (way == FewRows::tiles_wide) n = strips_in_place<2, 1>(a, x, n, n1, buffers);
  if (way == FewRows::tiles_near) return strips_in_place<1, 1, Ahead::near>(a, x, n, n1, buffers);
  if (way == FewRows::tiles_plain)
    return strips_in_place<1, 1, Ahead::nothing>(a, x, n, n1, buffers);
  return strips_in_place<1, 1>(a, x, n, n1, buffers);
}

// ---- vectors ----------------------------------------------------------------------------------

#if defined(C2C_TILE_VECTORS)
template <int R>
[[gnu::noinline]] void vector_sums(const InPlace& w, const float* x, float* sums) {
  const FlushSubnormals session;
  VectorUnit<R> unit(x);
  walk_in_place<Ahead::segment>(unit, w);
  unit.end(sums);
}

template <int R = 1>
inline void vector_sums_of(int64_t rows, const InPlace& w, const float* x, float* sums) {
  if (rows == R) return vector_sums<R>(w, x, sums);
  if constexpr (R < kVectorRows) vector_sums_of<R + 1>(rows, w, x, sums);
}

// Outputs [n, n1) by whole strips of 16; returns where they end.
inline int64_t vectors_in_place(const LinearArgs& a, const float* x, int64_t n, int64_t n1) {
  const int64_t row_bytes = a.w_stride * int64_t(sizeof(bf16));
  alignas(64) float sums[kVectorRows * kTile];
  for (; n + kTile <= n1; n += kTile) {
    const auto* w = static_cast<const uint8_t*>(a.w) + n * row_bytes;
    const bool more = n + 2 * kTile <= n1;
    vector_sums_of(a.m, {w, row_bytes, a.k / kStepColumns, more ? w + kTile * row_bytes : nullptr},
                   x, sums);
    const Strip strip(a, n, n + kTile);
    for (int64_t r = 0; r < a.m; ++r) {
      const vec sum = load(sums + r * kTile);
      store(a.out + r * a.out_stride + n, strip.biased ? add(sum, load(strip.bias)) : sum);
    }
  }
  return n;
}
#endif

}  // namespace tile_linear

}  // namespace c2c
#endif
