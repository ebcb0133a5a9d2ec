// `linear` on tiles for more than 32 rows of x: sums stay in tiles over all of K where it is short,
// else over chunks of it, between which they are parked.
//
//   x   a block of rows, packed             stays in the second-level cache
//   w   strips of 32 outputs                a copy of whole tiles, which all pairs of x's tiles meet
//
// A step of 32 columns takes four products, 64 processor cycles, and few instructions. So meanwhile
// lines of the next strips are copied, row by row, and sums of the pair before are turned and
// written. `ManyRows` says how long chunks are, and which operand stays in the first-level cache: a
// chunk of a strip, which all pairs meet, or a chunk of a pair, which a group of strips meets.
#pragma once
#include "strip_copy.h"
#include "ways.h"

#if defined(C2C_TILES)
namespace c2c::tile_linear {

constexpr int64_t kWholeSteps = 64;       // of 32 columns: a strip is 128 KiB at most
constexpr int64_t kWholeBytes = 3 << 19;  // of a block of x: three quarters of the cache
constexpr int64_t kLongRows = 512;        // of a block of x where K is longer
constexpr int64_t kChunkBytes = 1 << 20;  // of a chunk's columns of a block of x
constexpr int64_t kWriteSteps = 4;        // from one piece that is written to the next, at most

// Lines in sequence, into the first-level cache.
inline void near_lines(const void* at, int64_t count) {
  for (int64_t l = 0; l < count; ++l) prefetch(static_cast<const uint8_t*>(at) + l * tiles::kLine);
}

// Sums that are written a piece at a time.
class Writer {
 public:
  explicit Writer(const LinearArgs& a) : a_(a), strip_(a, 0, 0) {}

  void take(const Strip& strip, const float* sums, int64_t m, int columns) {
    strip_ = strip, sums_ = sums, m_ = m, columns_ = columns, piece_ = 0;
    count_ = pieces_of(strip, columns);
  }
  void write_one() {
    if (piece_ < count_) write_piece(a_, strip_, sums_, columns_, piece_++, m_);
  }
  void finish() {
    while (piece_ < count_) write_one();
  }

 private:
  const LinearArgs& a_;
  Strip strip_;
  const float* sums_ = nullptr;
  int64_t m_ = 0;
  int columns_ = 1, piece_ = 0, count_ = 0;
};

// The columns of a chunk, in steps: all where K is short, else as many as the cache has room for.
inline int64_t chunk_steps(int64_t steps, int64_t pairs, int64_t depth) {
  if (steps <= depth) return steps;
  const int64_t fits = std::max<int64_t>(kChunkBytes / (pairs * 2 * tiles::kBytes), 8);
  const int64_t most = std::min(fits, depth), chunks = (steps + most - 1) / most;
  return (steps + chunks - 1) / chunks;
}

// A block of rows of x with a range of outputs.
class RowsBlock {
 public:
  RowsBlock(const LinearArgs& a, const TiledX& x, const ManyRows& way, int64_t m0, int64_t m1,
            Buffers& buffers)
      : a_(a), x_(x), way_(way), width_(strip_outputs(a)), first_(m0 / kTile),
        tiles_((m1 - m0 + kTile - 1) / kTile), depth_(chunk_steps(x.steps, pairs(), way.depth)),
        buffers_(buffers), writer_(a) {
    const int64_t room = way.group * copy_bytes();
    now_ = reinterpret_cast<uint8_t*>(buffers.copy.room(2 * room / 4));
    next_ = now_ + room;
    if (depth_ < x.steps) parked_ = buffers.parked.room(way.panel * pairs() * kPairSums);
  }

  void outputs(int64_t n0, int64_t n1) {
    Place place{n0, 0, n0};
    GroupCopy first = copies(place, n1, now_);
    first.copy(first.left());
    while (place.n < n1) {
      const Place after = next_of(place, n1);
      GroupCopy upcoming;
      if (after.n < n1) upcoming = copies(after, n1, next_);
      group(place, n1, upcoming);
      std::swap(now_, next_);
      place = after;
    }
    writer_.finish();
  }

 private:
  static constexpr int64_t kPairSums = 4 * kTile * kTile;

  // A group of strips of w at output n, its columns from a step on, in the panel of strips from an
  // output on.
  struct Place {
    int64_t panel, step, n;
  };

  // One strip with one pair of x's tiles.
  struct Visit {
    int64_t step, count, pair;
    Source w;
    const uint8_t* next_w;  // what is read after it, or null
    const bf16* next_x;
    float *parked, *next_parked;
  };

  int64_t pairs() const { return (tiles_ + 1) / 2; }
  int64_t count_at(int64_t step) const { return std::min(depth_, x_.steps - step); }
  int64_t copy_bytes() const { return depth_ * 2 * tiles::kBytes; }
  Strip strip_at(int64_t n, int64_t end) const { return {a_, n, std::min(n + width_, end)}; }
  int64_t group_end(const Place& at, int64_t end) const {
    const int64_t most = parked_ ? at.panel + way_.panel * width_ : end;
    return std::min({at.n + way_.group * width_, most, end});
  }

  // Whether tiles read a strip where it lies: rows that are many lines of a power of two apart
  // would share few lines of the first-level cache.
  bool in_place(const Strip& strip) const {
    constexpr int64_t kSets = 64;  // of that cache
    const int64_t lines = a_.w_stride * int64_t(sizeof(bf16)) / tiles::kLine;
    return way_.in_place && a_.k % kStepColumns == 0 && strip.count == width_ &&
           a_.w_stride % kStepColumns == 0 && lines % (kSets / 2) != 0;
  }

  GroupCopy copies(const Place& at, int64_t end, uint8_t* out) const {
    GroupCopy copies;
    for (int64_t n = at.n, to = group_end(at, end); n < to; n += width_, out += copy_bytes()) {
      const Strip strip = strip_at(n, end);
      copies.strips[copies.count++] =
          StripCopy(a_, strip, at.step, count_at(at.step), in_place(strip) ? nullptr : out);
    }
    return copies;
  }

  Source source(const Strip& strip, const Place& at, int64_t index) const {
    if (!in_place(strip)) {
      const int64_t step = strip.tiles * tiles::kBytes;
      return {now_ + index * copy_bytes(), tiles::kLine, tiles::kBytes, step};
    }
    const int64_t row = a_.w_stride * int64_t(sizeof(bf16));
    const auto* w = static_cast<const uint8_t*>(a_.w) + strip.n * row + at.step * tiles::kLine;
    return {w, row, strip.hop * row, tiles::kLine};
  }

  // A panel's groups, then the same with the next chunk of columns, then the next panel.
  Place next_of(const Place& at, int64_t end) const {
    const int64_t n = group_end(at, end);
    if (!parked_) return {n, 0, n};
    const int64_t after = at.panel + way_.panel * width_;
    if (n < std::min(after, end)) return {at.panel, at.step, n};
    if (at.step + depth_ < x_.steps) return {at.panel, at.step + depth_, at.panel};
    return {after, 0, after};
  }

  const bf16* x_at(int64_t pair, int64_t step) const {
    return x_.tile(first_ + 2 * pair) + step * x_.step_size();
  }
  float* parked_at(const Place& at, int64_t n, int64_t pair) const {
    return parked_ ? parked_ + ((n - at.panel) / width_ * pairs() + pair) * kPairSums : nullptr;
  }

  void group(const Place& at, int64_t end, GroupCopy& upcoming) {
    const int64_t to = group_end(at, end), count = count_at(at.step);
    const int64_t strips = (to - at.n + width_ - 1) / width_, visits = pairs() * strips;
    const int64_t pace = (upcoming.left() + visits * count - 1) / (visits * count);
    for (int64_t p = 0; p < pairs(); ++p)
      for (int64_t i = 0; i < strips; ++i) {
        const int64_t n = at.n + i * width_, next = i + 1 < strips ? i + 1 : 0;
        const int64_t next_pair = p + (next == 0);
        const bool more = next_pair < pairs();
        const Strip strip = strip_at(n, end);
        const Visit visit{
            at.step, count, p, source(strip, at, i),
            more ? source(strip_at(at.n + next * width_, end), at, next).at : nullptr,
            more && next == 0 ? x_at(next_pair, at.step) : nullptr, parked_at(at, n, p),
            more && at.step > 0 ? parked_at(at, at.n + next * width_, next_pair) : nullptr};
        if (2 * p + 1 < tiles_)
          visit_of<2>(strip, visit, upcoming, pace);
        else
          visit_of<1>(strip, visit, upcoming, pace);
      }
    upcoming.copy(upcoming.left());
  }

  template <int NB>
  void visit_of(const Strip& strip, const Visit& visit, GroupCopy& upcoming, int64_t pace) {
    if (strip.tiles == 2)
      walk<2, NB>(strip, visit, upcoming, pace);
    else
      walk<1, NB>(strip, visit, upcoming, pace);
  }

  // What is read some steps after step k of a visit, perhaps in the one after it.
  template <int NA, int NB>
  void announce(const Visit& v, int64_t k) const {
    const int64_t tile = x_.step_size(), lines = tile * int64_t(sizeof(bf16)) / tiles::kLine;
    if (way_.prefetch_x > 0) {
      const int64_t at = k + way_.prefetch_x;
      const bf16* x = at < v.count ? x_at(v.pair, v.step) + at * tile
                      : v.next_x   ? v.next_x + (at - v.count) * tile
                                   : nullptr;
      if (x) near_lines(x, lines);
      if (x && NB == 2) near_lines(x + x_.steps * tile, lines);
    }
    if (way_.prefetch_w > 0) {
      const int64_t at = k + way_.prefetch_w;
      const uint8_t* w = at < v.count ? v.w.at + at * v.w.step
                         : v.next_w   ? v.next_w + (at - v.count) * v.w.step
                                      : nullptr;
      for (int i = 0; w && i < NA; ++i)
        for (int r = 0; r < kTile; ++r) prefetch(w + i * v.w.tile + r * v.w.row);
    }
    if (v.next_parked && (way_.prefetch_x > 0 || way_.prefetch_w > 0)) {
      constexpr int64_t kLines = kPairSums * int64_t(sizeof(float)) / tiles::kLine;
      const int64_t from = kLines * k / v.count, to = kLines * (k + 1) / v.count;
      near_lines(v.next_parked + from * kTile, to - from);
    }
  }

  template <int NA, int NB>
  void walk(const Strip& strip, const Visit& v, GroupCopy& upcoming, int64_t pace) {
    const int64_t every = std::clamp<int64_t>(v.count / (NA * NB), 1, kWriteSteps);
    const bf16* at[NB];
    for (int b = 0; b < NB; ++b) at[b] = x_at(v.pair, v.step) + b * x_.steps * x_.step_size();
    const uint8_t* w = v.w.at;
    Chain<NA, NB>::begin(v.step > 0 ? v.parked : nullptr);
    for (int64_t k = 0; k < v.count; ++k, w += v.w.step) {
      announce<NA, NB>(v, k);
      Chain<NA, NB>::step(w, v.w, at, 4 * x_.columns);
      for (int b = 0; b < NB; ++b) at[b] += x_.step_size();
      upcoming.copy(pace);
      if (k % every == 0) writer_.write_one();
    }
    writer_.finish();
    if (v.step + v.count < x_.steps) {
      Chain<NA, NB>::end(v.parked);
      return;
    }
    Chain<NA, NB>::end(buffers_.sums);
    writer_.take(strip, buffers_.sums, (first_ + 2 * v.pair) * kTile, NB);
  }

  const LinearArgs& a_;
  const TiledX& x_;
  const ManyRows& way_;
  const int64_t width_;          // outputs of a strip
  const int64_t first_, tiles_;  // of x
  const int64_t depth_;          // steps of a chunk
  Buffers& buffers_;
  Writer writer_;
  uint8_t *now_, *next_;  // copies of w: one is multiplied while the other is filled
  float* parked_ = nullptr;
};

}  // namespace c2c::tile_linear
#endif
