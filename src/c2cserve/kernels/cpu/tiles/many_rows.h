// `linear` on tiles for more than 32 rows of x: sums stay in tiles over all of K where it is short,
// else over chunks of it, between which they are parked.
//
//   x   a block of rows, packed       stays in the second-level cache
//   w   strips of 32 outputs          in place, or a copy of whole tiles; all pairs of x's tiles meet
//                                     a strip before the next one
//
// A step of 32 columns takes four products, 64 processor cycles, and few instructions. So meanwhile
// lines of the next strip are announced or copied, row by row, and sums of the pair before are
// written.
#pragma once
#include "many_writes.h"
#include "strip_copy.h"

#if defined(C2C_TILES)
namespace c2c::tile_linear {

constexpr int64_t kChunkSteps = 64;       // of 32 columns, of a chunk at most
constexpr int64_t kPanel = 8;             // strips that share a chunk of x before the next one
constexpr int64_t kWholeBytes = 3 << 19;  // of a block of x: three quarters of the cache
constexpr int64_t kLongRows = 512;        // of a block of x where K is longer than a chunk
constexpr int64_t kChunkBytes = 1 << 20;  // of a chunk's columns of a block of x

// The columns of a chunk, in steps: all where K is short, else as many as the cache has room for.
inline int64_t chunk_steps(int64_t steps, int64_t pairs) {
  if (steps <= kChunkSteps) return steps;
  const int64_t fits = std::max<int64_t>(kChunkBytes / (pairs * 2 * tiles::kBytes), 8);
  const int64_t most = std::min(fits, kChunkSteps), chunks = (steps + most - 1) / most;
  return (steps + chunks - 1) / chunks;
}

// Whether tiles read rows of w where they lie. Rows that share lines of the cache are copied.
inline bool rows_in_place(const LinearArgs& a) {
  return a.k % kStepColumns == 0 && a.w_stride % kStepColumns == 0 &&
         !share_sets(a.w_stride * int64_t(sizeof(bf16)));
}

// A block of rows of x, with one range of outputs after another.
class RowsBlock {
 public:
  RowsBlock(const LinearArgs& a, const TiledX& x, bool in_place, int64_t m0, int64_t m1,
            Buffers& buffers)
      : a_(a), x_(x), in_place_(in_place), width_(strip_outputs(a)), first_(m0 / kTile),
        tiles_((m1 - m0 + kTile - 1) / kTile), depth_(chunk_steps(x.steps, pairs())),
        buffers_(buffers), writer_(a) {
    const int64_t copy_bytes = depth_ * 2 * tiles::kBytes;
    now_ = reinterpret_cast<uint8_t*>(buffers.copy.room(2 * copy_bytes / 4));
    next_ = now_ + copy_bytes;
    if (depth_ < x.steps) parked_ = buffers.parked.room(kPanel * pairs() * kPairSums);
  }

  // Outputs `now`. `next()` says which come after them in the same rows, if any: reading them begins.
  // It is asked late. So what is next may be taken by others until then.
  template <typename Next>
  void outputs(const Outputs now, const Next& next) {
    Place place{now.n, 0, now.n};
    if (!begun_) {
      StripCopy first = copy_of(place, now.end, now_);
      first.copy(first.left());
    }
    while (place.n < now.end) {
      const Place then = next_of(place, now.end);
      StripCopy upcoming;
      if (then.n < now.end)
        upcoming = copy_of(then, now.end, next_);
      else if (const Outputs after = next(); (begun_ = after.n < after.end))
        upcoming = copy_of({after.n, 0, after.n}, after.end, next_);
      multiply(place, now.end, upcoming);
      upcoming.copy(upcoming.left());
      std::swap(now_, next_);
      place = then;
    }
  }
  void finish() { writer_.finish(); }

 private:
  static constexpr int64_t kPairSums = 4 * kTile * kTile;

  // The strip of w at output n, its columns from a step on, in the panel from an output on.
  struct Place {
    int64_t panel, step, n;
  };

  int64_t pairs() const { return (tiles_ + 1) / 2; }
  int64_t count_at(int64_t step) const { return std::min(depth_, x_.steps - step); }
  Strip strip_at(int64_t n, int64_t end) const { return {a_, n, std::min(n + width_, end)}; }
  bool in_place(const Strip& strip) const { return in_place_ && strip.count == width_; }

  StripCopy copy_of(const Place& at, int64_t end, uint8_t* out) const {
    const Strip strip = strip_at(at.n, end);
    return {a_, strip, at.step, count_at(at.step), in_place(strip) ? nullptr : out};
  }

  Source source(const Strip& strip, int64_t step) const {
    if (!in_place(strip))
      return {now_, tiles::kLine, tiles::kBytes, strip.tiles * tiles::kBytes};
    const int64_t row = a_.w_stride * int64_t(sizeof(bf16));
    const auto* w = static_cast<const uint8_t*>(a_.w) + strip.n * row + step * tiles::kLine;
    return {w, row, strip.hop * row, tiles::kLine};
  }

  // A panel's strips, then the same with the next chunk of columns, then the next panel.
  Place next_of(const Place& at, int64_t end) const {
    const int64_t n = at.n + width_;
    if (!parked_) return {n, 0, n};
    const int64_t after = at.panel + kPanel * width_;
    if (n < std::min(after, end)) return {at.panel, at.step, n};
    if (at.step + depth_ < x_.steps) return {at.panel, at.step + depth_, at.panel};
    return {after, 0, after};
  }

  // A strip with all pairs of x's tiles.
  void multiply(const Place& at, int64_t end, StripCopy& upcoming) {
    const Strip strip = strip_at(at.n, end);
    const int64_t steps = pairs() * count_at(at.step);
    const int64_t pace = (upcoming.left() + steps - 1) / steps;
    for (int64_t p = 0; p < pairs(); ++p)
      if (2 * p + 1 < tiles_)
        visit<2>(strip, at, p, upcoming, pace);
      else
        visit<1>(strip, at, p, upcoming, pace);
  }

  template <int NB>
  void visit(const Strip& strip, const Place& at, int64_t p, StripCopy& upcoming, int64_t pace) {
    if (strip.tiles == 2)
      walk<2, NB>(strip, at, p, upcoming, pace);
    else
      walk<1, NB>(strip, at, p, upcoming, pace);
  }

  template <int NA, int NB>
  void walk(const Strip& strip, const Place& at, int64_t p, StripCopy& upcoming, int64_t pace) {
    const int64_t count = count_at(at.step), tile = first_ + 2 * p;
    const int64_t every = writer_.pace(count), m = tile * kTile;
    const bool last = at.step + count == x_.steps;
    const int64_t rows = last ? (NB * kTile + count - 1) / count : 0;  // announced at each step
    float* parked =
        parked_ ? parked_ + ((at.n - at.panel) / width_ * pairs() + p) * kPairSums : nullptr;
    const bf16* x[NB];
    for (int b = 0; b < NB; ++b) x[b] = x_.tile(tile + b) + at.step * x_.step_size();
    const Source source = this->source(strip, at.step);
    const uint8_t* w = source.at;
    Chain<NA, NB>::begin(at.step > 0 ? parked : nullptr);
    for (int64_t k = 0; k < count; ++k, w += source.step) {
      Chain<NA, NB>::step(w, source, x, 4 * x_.columns);
      for (int b = 0; b < NB; ++b) x[b] += x_.step_size();
      upcoming.copy(pace);
      if (k % every == 0) writer_.write_one();
      writer_.announce(strip, m + k * rows, std::min(m + (k + 1) * rows, m + NB * kTile));
    }
    writer_.finish();
    Chain<NA, NB>::end(last ? buffers_.sums : parked);
    if (last) writer_.take(strip, buffers_.sums, m, NB);
  }

  const LinearArgs& a_;
  const TiledX& x_;
  const bool in_place_;          // whole strips of w
  const int64_t width_;          // outputs of a strip
  const int64_t first_, tiles_;  // of x
  const int64_t depth_;          // steps of a chunk
  Buffers& buffers_;
  ManyWriter writer_;
  uint8_t *now_, *next_;  // copies of w: one is multiplied while the other is filled
  float* parked_ = nullptr;
  bool begun_ = false;  // the first strip of the next range is announced, or copied
};

}  // namespace c2c::tile_linear
#endif
