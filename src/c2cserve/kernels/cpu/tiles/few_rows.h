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
#include "along.h"

#if defined(C2C_TILES)
namespace c2c {

// How up to 16 rows are multiplied. Every way gives the same bits, so that measuring decides.
enum class FewRows : int {
  chosen = 0,
  vectors = 1,       // 16 outputs at a time, announced
  tiles = 2,         // the same on tiles
  tiles_plain = 3,   // not announced
  tiles_long = 4,    // announced by segments of 4 KiB of each row
  copied = 5,        // on tiles, read from a copy of each segment
  copied_long = 6,   // the same, by segments of 4 KiB of each row
  copied_whole = 7,  // the same, by whole strips: one sequence in memory
  along = 8,         // one row of w at a time, for up to four rows of x: one sequence in memory
};

namespace tile_linear {

constexpr FewRows kFewRows = FewRows::tiles;
constexpr int64_t kSegmentSteps = 16;  // of 64 bytes of a row
constexpr int64_t kLongSteps = 64;     // the same of the ways with long segments
constexpr int64_t kWholeSteps = 1 << 30;
constexpr int64_t kNearBytes = 512;    // how far a row's reads are announced to the first level

// What is announced: nothing, or what comes soon in the same rows, and the next segment.
enum class Ahead { nothing, segment };

// What is read of w in place: a strip of rows, and the strip after it, or null.
struct InPlace {
  const uint8_t* at;
  int64_t row_bytes, steps;
  const uint8_t* after;
};

// The segments of a strip, of equal lengths but for rounding. The last one is followed by the first
// of the strip after it, which has as many steps.
struct Segments {
  const InPlace& w;
  int64_t count;

  Segments(const InPlace& strip, int64_t steps_max)
      : w(strip), count((strip.steps + steps_max - 1) / steps_max) {}
  int64_t begin(int64_t segment) const { return w.steps * segment / count; }
  const uint8_t* next(int64_t segment) const {
    return segment + 1 == count ? w.after : w.at + begin(segment + 1) * tiles::kLine;
  }
  int64_t next_steps(int64_t segment) const {
    return segment + 1 == count ? begin(1) : begin(segment + 2) - begin(segment + 1);
  }
};

// All of a strip through `unit`, which multiplies Unit::kRows rows of w at a time.
template <Ahead A, int64_t kSteps, typename Unit>
inline void walk_in_place(Unit& unit, const InPlace& w) {
  const Segments cuts(w, kSteps);
  for (int64_t s = 0; s < cuts.count; ++s) {
    const int64_t end = cuts.begin(s + 1);
    Announcer upcoming(cuts.next(s), w.row_bytes, Unit::kRows, cuts.next_steps(s));
    for (int64_t k = cuts.begin(s); k < end; ++k) {
      const uint8_t* at = w.at + k * tiles::kLine;
      if (A == Ahead::segment) {
        upcoming.announce(Unit::kRows);
        for (int64_t r = 0; r < Unit::kRows; ++r) prefetch(at + kNearBytes + r * w.row_bytes);
      }
      unit.step(at, w.row_bytes);
    }
    if (A == Ahead::segment) upcoming.announce(upcoming.left());
  }
}

// Lines of 16 rows of w that are copied little by little, row by row: reads of memory in sequence,
// which the processor's own prefetching follows. Announcing a line takes one of the few buffers in
// which a core waits for memory; that prefetching has more of them. The copy is made of whole tiles.
class Copier {
 public:
  Copier(const uint8_t* at, int64_t row_bytes, int64_t lines, uint8_t* out)
      : at_(at), row_bytes_(row_bytes), lines_(lines), out_(out), row_(at ? 0 : kTile) {}

  void copy(int64_t count) {
    for (; count > 0 && row_ < kTile; --count) {
      std::memcpy(out_ + line_ * tiles::kBytes + row_ * tiles::kLine, at_ + line_ * tiles::kLine,
                  tiles::kLine);
      if (++line_ < lines_) continue;
      line_ = 0;
      at_ += row_bytes_;
      ++row_;
    }
  }
  int64_t left() const { return (kTile - row_) * lines_ - line_; }

 private:
  const uint8_t* at_;
  int64_t row_bytes_, lines_;
  uint8_t* out_;
  int64_t row_, line_ = 0;
};

// Room for the copies of a segment and of the next one, which change places.
struct Copies {
  uint8_t* now;
  uint8_t* next;
  bool filled;  // `now` holds the first segment of the strip

  Copies(Buffers& buffers, int64_t steps) : filled(false) {
    now = reinterpret_cast<uint8_t*>(buffers.copy.room(2 * steps * tiles::kBytes / 4));
    next = now + steps * tiles::kBytes;
  }
};

// All of a strip of 16 outputs through `unit`: a segment is copied while the one before is
// multiplied.
template <int64_t kSteps, typename Unit>
inline void walk_copied(Unit& unit, const InPlace& w, Copies& copies) {
  const Segments cuts(w, kSteps);
  if (!copies.filled) Copier(w.at, w.row_bytes, cuts.begin(1), copies.now).copy(kTile * cuts.begin(1));
  for (int64_t s = 0; s < cuts.count; ++s) {
    const int64_t steps = cuts.begin(s + 1) - cuts.begin(s);
    Copier upcoming(cuts.next(s), w.row_bytes, cuts.next_steps(s), copies.next);
    for (int64_t k = 0; k < steps; ++k) {
      upcoming.copy(kTile);
      unit.step(copies.now + k * tiles::kBytes, tiles::kLine);
    }
    upcoming.copy(upcoming.left());
    std::swap(copies.now, copies.next);
  }
  copies.filled = w.after != nullptr;
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
template <int NA, int NB, Ahead A = Ahead::segment, int64_t kSteps = kSegmentSteps>
int64_t strips_in_place(const LinearArgs& a, const TiledX& x, int64_t n, int64_t n1,
                        Buffers& buffers) {
  constexpr int64_t kOutputs = NA * kTile;
  const int64_t row_bytes = a.w_stride * int64_t(sizeof(bf16));
  for (; n + kOutputs <= n1; n += kOutputs) {
    const auto* w = static_cast<const uint8_t*>(a.w) + n * row_bytes;
    const bool more = n + 2 * kOutputs <= n1;
    TileUnit<NA, NB> unit(x);
    walk_in_place<A, kSteps>(unit, {w, row_bytes, x.steps, more ? w + kOutputs * row_bytes : nullptr});
    unit.end(buffers.sums);
    write_strip<NA, NB>(a, Strip(a, n, n + kOutputs), buffers.sums, 0);
  }
  return n;
}

// The same by copies, for up to 16 rows of x.
template <int64_t kSteps>
int64_t strips_copied(const LinearArgs& a, const TiledX& x, int64_t n, int64_t n1,
                      Buffers& buffers) {
  const int64_t row_bytes = a.w_stride * int64_t(sizeof(bf16));
  Copies copies(buffers, std::min(kSteps, x.steps));
  for (; n + kTile <= n1; n += kTile) {
    const auto* w = static_cast<const uint8_t*>(a.w) + n * row_bytes;
    const bool more = n + 2 * kTile <= n1;
    TileUnit<1, 1> unit(x);
    walk_copied<kSteps>(unit, {w, row_bytes, x.steps, more ? w + kTile * row_bytes : nullptr},
                        copies);
    unit.end(buffers.sums);
    write_strip<1, 1>(a, Strip(a, n, n + kTile), buffers.sums, 0);
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
  switch (way) {
    case FewRows::tiles_plain:
      return strips_in_place<1, 1, Ahead::nothing>(a, x, n, n1, buffers);
    case FewRows::tiles_long:
      return strips_in_place<1, 1, Ahead::segment, kLongSteps>(a, x, n, n1, buffers);
    case FewRows::copied:
      return strips_copied<kSegmentSteps>(a, x, n, n1, buffers);
    case FewRows::copied_long:
      return strips_copied<kLongSteps>(a, x, n, n1, buffers);
    case FewRows::copied_whole:
      return strips_copied<kWholeSteps>(a, x, n, n1, buffers);
    default:
      return strips_in_place<1, 1>(a, x, n, n1, buffers);
  }
}

// ---- vectors ----------------------------------------------------------------------------------

#if defined(C2C_TILE_VECTORS)
template <int R>
[[gnu::noinline]] void vector_sums(const InPlace& w, const float* x, float* sums) {
  const FlushSubnormals session;
  VectorUnit<R> unit(x);
  walk_in_place<Ahead::segment, kSegmentSteps>(unit, w);
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
