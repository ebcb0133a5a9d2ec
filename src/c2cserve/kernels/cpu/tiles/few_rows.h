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

#if defined(C2C_TILES)
namespace c2c {

namespace tile_linear {

constexpr int64_t kSegmentSteps = 16;  // of 64 bytes of a row
constexpr int64_t kHalfTile = 8;       // outputs: the least that threads share out
constexpr int64_t kNearBytes = 512;    // how far a row's reads are announced to the first level

// What is read of w in place: a strip of rows, and those of the strip after it, if there is one.
struct InPlace {
  const uint8_t* at;
  int64_t row_bytes, steps, rows;
  const uint8_t* after;
  int64_t after_rows;
};

// The segments of a strip, of equal lengths but for rounding. The last one is followed by the first
// of the strip after it, which has as many steps.
struct Segments {
  const InPlace& w;
  int64_t count;

  explicit Segments(const InPlace& strip)
      : w(strip), count((strip.steps + kSegmentSteps - 1) / kSegmentSteps) {}
  int64_t begin(int64_t segment) const { return w.steps * segment / count; }
  const uint8_t* next(int64_t segment) const {
    return segment + 1 == count ? w.after : w.at + begin(segment + 1) * tiles::kLine;
  }
  int64_t next_rows(int64_t segment) const { return segment + 1 == count ? w.after_rows : w.rows; }
  int64_t next_steps(int64_t segment) const {
    return segment + 1 == count ? begin(1) : begin(segment + 2) - begin(segment + 1);
  }
};

// A strip of NA x 16 outputs for NB x 16 rows of x.
template <int NA, int NB>
class TileUnit {
 public:
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

// All of a strip.
template <int NA, int NB>
inline void walk_in_place(TileUnit<NA, NB>& unit, const InPlace& w) {
  const Segments cuts(w);
  for (int64_t s = 0; s < cuts.count; ++s) {
    const int64_t end = cuts.begin(s + 1);
    Announcer upcoming(cuts.next(s), w.row_bytes, cuts.next_rows(s), cuts.next_steps(s));
    for (int64_t k = cuts.begin(s); k < end; ++k) {
      const uint8_t* at = w.at + k * tiles::kLine;
      upcoming.announce(w.rows);
      for (int64_t r = 0; r < w.rows; ++r) prefetch(at + kNearBytes + r * w.row_bytes);
      unit.step(at, w.row_bytes);
    }
    upcoming.announce(upcoming.left());
  }
}

// Rows of w from output `n` on, as many as a strip has, or what is left of whole halves of tiles.
inline int64_t strip_rows(int64_t n, int64_t n1, int64_t whole) {
  return std::min(whole, (n1 - n) / kHalfTile * kHalfTile);
}

// Outputs [n, n1) by strips of `whole`, which are NA tiles or half of one; returns where they end.
template <int NA, int NB>
int64_t strips_in_place(const LinearArgs& a, const TiledX& x, int64_t n, int64_t n1, int64_t whole,
                        Buffers& buffers) {
  const int64_t row_bytes = a.w_stride * int64_t(sizeof(bf16));
  for (; n + whole <= n1; n += whole) {
    const auto *w = static_cast<const uint8_t*>(a.w) + n * row_bytes, *after = w + whole * row_bytes;
    TileUnit<NA, NB> unit(x);
    walk_in_place(unit, {w, row_bytes, x.steps, whole, after, strip_rows(n + whole, n1, whole)});
    unit.end(buffers.sums);
    write_strip(a, Strip(a, n, n + whole), buffers.sums, NB, 0);
  }
  return n;
}

// The same for a gated product: gates of a tile or half of one, then their ups.
template <int NB>
int64_t gated_in_place(const LinearArgs& a, const TiledX& x, int64_t n, int64_t n1, int64_t whole,
                       Buffers& buffers) {
  const int64_t row_bytes = a.w_stride * int64_t(sizeof(bf16));
  for (; n + whole <= n1; n += whole) {
    const auto* gates = static_cast<const uint8_t*>(a.w) + n * row_bytes;
    const auto *ups = gates + a.n * row_bytes, *after = gates + whole * row_bytes;
    TileUnit<1, NB> gate(x);
    walk_in_place(gate, {gates, row_bytes, x.steps, whole, ups, whole});
    gate.end(buffers.sums);
    TileUnit<1, NB> up(x);
    walk_in_place(up, {ups, row_bytes, x.steps, whole, after, strip_rows(n + whole, n1, whole)});
    up.end(buffers.sums + NB * kTile * kTile);
    write_strip(a, Strip(a, n, n + whole), buffers.sums, NB, 0);
  }
  return n;
}

// Outputs [n, n1) by strips of a tile, or of half of one; returns where they end.
template <int NB>
int64_t narrow_strips_in_place(const LinearArgs& a, const TiledX& x, int64_t n, int64_t n1,
                               int64_t whole, Buffers& buffers) {
  const tiles::Session session(int(x.columns), int(whole));
  if (a.gated) return gated_in_place<NB>(a, x, n, n1, whole, buffers);
  if constexpr (NB == 2)
    if (whole == kTile) n = strips_in_place<2, NB>(a, x, n, n1, 2 * kTile, buffers);
  return strips_in_place<1, NB>(a, x, n, n1, whole, buffers);
}

// Outputs [n, n1) by whole tiles, then half of one; returns where they end.
inline int64_t tiles_in_place(const LinearArgs& a, const TiledX& x, int64_t n, int64_t n1,
                              Buffers& buffers) {
  const auto strips = a.m <= kTile ? narrow_strips_in_place<1> : narrow_strips_in_place<2>;
  n = strips(a, x, n, n1, kTile, buffers);
  return n + kHalfTile <= n1 ? strips(a, x, n, n1, kHalfTile, buffers) : n;
}

}  // namespace tile_linear

}  // namespace c2c
#endif
