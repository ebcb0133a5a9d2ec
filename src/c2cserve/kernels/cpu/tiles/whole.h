// `linear` on tiles for more than 32 rows of x: sums stay in tiles over all of K where it is short,
// else over chunks of it, between which they are parked.
//
//   x   a block of rows, packed             stays in the second-level cache
//   w   strips of 32 outputs                a copy of whole tiles, which all pairs of x's tiles meet
//
// A step of 32 columns takes four products, 64 processor cycles, and few instructions. So meanwhile
// lines of the next strip are copied, row by row, and sums of the pair before are turned and written.
#pragma once
#include "parked.h"

#if defined(C2C_TILES)
namespace c2c::tile_linear {

constexpr int64_t kWholeSteps = 64;         // of 32 columns: a strip is 128 KiB at most
constexpr int64_t kWholeBytes = 3 << 19;    // of a block of x: three quarters of the cache
constexpr int64_t kChunkBytes = 1 << 20;    // of a chunk's columns of a block of x
constexpr int64_t kWriteSteps = 4;          // from one tile that is written to the next

// Columns [step, step + steps) of a strip of w as tiles, [step][tile][16][32], copied little by little
// in the order of memory. What lies beyond w is zero.
class StripCopy {
 public:
  StripCopy() = default;
  StripCopy(const LinearArgs& a, const Strip& strip, int64_t step, int64_t steps, uint8_t* out)
      : out_(out), hop_(strip.tiles * tiles::kBytes), row_bytes_(a.w_stride * int64_t(sizeof(bf16))),
        rows_(strip.count) {
    const int64_t k = step * kStepColumns, columns = std::min(steps * kStepColumns, a.k - k);
    lines_ = columns / kStepColumns;
    const auto* w = static_cast<const bf16*>(a.w) + strip.n * a.w_stride + k;
    at_ = reinterpret_cast<const uint8_t*>(w);
    if (const auto rest = size_t(columns % kStepColumns); rest > 0)
      for (int64_t r = 0; r < rows_; ++r) {
        uint8_t* to = out + lines_ * hop_ + r * tiles::kLine;
        std::memset(to, 0, tiles::kLine);
        std::memcpy(to, w + r * a.w_stride + lines_ * kStepColumns, rest * sizeof(bf16));
      }
    for (int64_t r = rows_; r < strip.tiles * kTile; ++r)
      for (int64_t s = 0; s < steps; ++s)
        std::memset(out + s * hop_ + r * tiles::kLine, 0, tiles::kLine);
    if (lines_ == 0) rows_ = 0;
  }

  void copy(int64_t count) {
    while (count > 0 && rows_ > 0) {
      const int64_t run = std::min(count, lines_ - line_);
      const uint8_t* from = at_ + line_ * tiles::kLine;
      uint8_t* to = out_ + line_ * hop_;
      for (int64_t l = 0; l < run; ++l, from += tiles::kLine, to += hop_) {
        prefetch_early(from + kEarlyBytes);
        std::memcpy(to, from, tiles::kLine);
      }
      count -= run;
      line_ += run;
      if (line_ < lines_) return;
      line_ = 0;
      at_ += row_bytes_;
      out_ += tiles::kLine;
      --rows_;
    }
  }
  int64_t left() const { return rows_ * lines_ - line_; }

 private:
  static constexpr int64_t kEarlyBytes = 2048;  // how far reads are announced
  uint8_t* out_ = nullptr;
  int64_t hop_ = 0, row_bytes_ = 0, rows_ = 0, lines_ = 0, line_ = 0;
  const uint8_t* at_ = nullptr;
};

// Sums that are written a tile at a time.
class Writer {
 public:
  explicit Writer(const LinearArgs& a) : a_(a), strip_(a, 0, 0) {}

  void take(const Strip& strip, const float* sums, int64_t m, int columns) {
    strip_ = strip, sums_ = sums, m_ = m, columns_ = columns, tile_ = 0;
    count_ = strip.tiles * columns;
  }
  void write_one() {
    if (tile_ == count_) return;
    const int64_t row = m_ + tile_ % columns_ * kTile;
    write_tile(a_, strip_, tile_ / columns_, sums_ + tile_ * kTile * kTile, row,
               std::min<int64_t>(kTile, a_.m - row));
    ++tile_;
  }
  void finish() {
    while (tile_ < count_) write_one();
  }

 private:
  const LinearArgs& a_;
  Strip strip_;
  const float* sums_ = nullptr;
  int64_t m_ = 0;
  int columns_ = 1, tile_ = 0, count_ = 0;
};

// The columns of a chunk, in steps: all where K is short, else as many as the cache has room for.
inline int64_t chunk_steps(int64_t steps, int64_t pairs) {
  if (steps <= kWholeSteps) return steps;
  const int64_t most = std::clamp<int64_t>(kChunkBytes / (pairs * 2 * tiles::kBytes), 8, kWholeSteps);
  const int64_t chunks = (steps + most - 1) / most;
  return (steps + chunks - 1) / chunks;
}

// A block of rows of x with a range of outputs.
class WholeBlock {
 public:
  WholeBlock(const LinearArgs& a, const TiledX& x, int64_t m0, int64_t m1, Buffers& buffers)
      : a_(a), x_(x), first_(m0 / kTile), tiles_((m1 - m0 + kTile - 1) / kTile),
        depth_(chunk_steps(x.steps, pairs())), buffers_(buffers), writer_(a) {
    const int64_t room = depth_ * 2 * tiles::kBytes;
    now_ = reinterpret_cast<uint8_t*>(buffers.copy.room(2 * room / 4));
    next_ = now_ + room;
    if (depth_ < x.steps) parked_ = buffers.parked.room(kPanelStrips * pairs() * kPairSums);
  }

  void outputs(int64_t n0, int64_t n1) {
    Place place{n0, 0, n0};
    StripCopy first = copy_of(place, n1, now_);
    first.copy(first.left());
    while (place.n < n1) {
      const Place after = next_of(place, n1);
      StripCopy upcoming;
      if (after.n < n1) upcoming = copy_of(after, n1, next_);
      strip(place, n1, upcoming);
      std::swap(now_, next_);
      place = after;
    }
    writer_.finish();
  }

 private:
  static constexpr int64_t kStrip = 2 * kTile, kPairSums = 4 * kTile * kTile;

  // A strip of w at output n, its columns from a step on, in the panel of strips from an output on.
  struct Place {
    int64_t panel, step, n;
  };

  int64_t pairs() const { return (tiles_ + 1) / 2; }
  int64_t count_at(int64_t step) const { return std::min(depth_, x_.steps - step); }
  Strip strip_at(int64_t n, int64_t end) const { return {a_, n, std::min(n + kStrip, end)}; }
  StripCopy copy_of(const Place& at, int64_t end, uint8_t* out) const {
    return {a_, strip_at(at.n, end), at.step, count_at(at.step), out};
  }

  // A panel's strips, then the same with the next chunk of columns, then the next panel.
  Place next_of(const Place& at, int64_t end) const {
    const int64_t n = at.n + kStrip;
    if (!parked_) return {n, 0, n};
    const int64_t after = at.panel + kPanelStrips * kStrip;
    if (n < std::min(after, end)) return {at.panel, at.step, n};
    if (at.step + depth_ < x_.steps) return {at.panel, at.step + depth_, at.panel};
    return {after, 0, after};
  }

  void strip(const Place& at, int64_t end, StripCopy& upcoming) {
    const Strip strip = strip_at(at.n, end);
    const int64_t steps = pairs() * count_at(at.step);
    const int64_t pace = (upcoming.left() + steps - 1) / steps;
    for (int64_t p = 0; p < pairs(); ++p) {
      if (2 * p + 1 < tiles_)
        visit_of<2>(strip, at, p, upcoming, pace);
      else
        visit_of<1>(strip, at, p, upcoming, pace);
    }
    upcoming.copy(upcoming.left());
  }

  template <int NB>
  void visit_of(const Strip& strip, const Place& at, int64_t pair, StripCopy& upcoming,
                int64_t pace) {
    if (strip.tiles == 2)
      visit<2, NB>(strip, at, pair, upcoming, pace);
    else
      visit<1, NB>(strip, at, pair, upcoming, pace);
  }

  template <int NA, int NB>
  void visit(const Strip& strip, const Place& place, int64_t pair, StripCopy& upcoming,
             int64_t pace) {
    const int64_t tile = first_ + 2 * pair, count = count_at(place.step);
    const int64_t index = (place.n - place.panel) / kStrip * pairs() + pair;
    float* parked = parked_ ? parked_ + index * kPairSums : nullptr;
    const bf16* at[NB];
    for (int b = 0; b < NB; ++b) at[b] = x_.tile(tile + b) + place.step * x_.step_size();
    const uint8_t* w = now_;
    const Source source{w, tiles::kLine, tiles::kBytes, NA * tiles::kBytes};
    Chain<NA, NB>::begin(place.step > 0 ? parked : nullptr);
    for (int64_t k = 0; k < count; ++k, w += source.step) {
      Chain<NA, NB>::step(w, source, at, 4 * x_.columns);
      for (int b = 0; b < NB; ++b) at[b] += x_.step_size();
      upcoming.copy(pace);
      if (k % kWriteSteps == 0) writer_.write_one();
    }
    writer_.finish();
    if (place.step + count < x_.steps) {
      Chain<NA, NB>::end(parked);
      return;
    }
    Chain<NA, NB>::end(buffers_.sums);
    writer_.take(strip, buffers_.sums, tile * kTile, NB);
  }

  const LinearArgs& a_;
  const TiledX& x_;
  const int64_t first_, tiles_;  // of x
  const int64_t depth_;          // steps of a chunk
  Buffers& buffers_;
  Writer writer_;
  uint8_t *now_, *next_;  // copies of w: one is multiplied while the other is filled
  float* parked_ = nullptr;
};

}  // namespace c2c::tile_linear
#endif
