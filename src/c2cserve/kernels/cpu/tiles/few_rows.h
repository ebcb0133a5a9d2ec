// `linear` on tiles for up to 32 rows of x: w is read in place, at the speed of memory.
//
//   range       row  0 [###########]           a strip has 16 rows that lie `gap` apart. The next
//   of 16 gap        1 [...........]           strip has the rows that follow them in memory: so
//   outputs         ..                         16 sequences are read, however short a row is
//                  gap [###########]
//              gap + 1 [...........]
//                   ..
//
// A processor's own prefetching follows some 16 or 32 long sequences. If a strip's rows are neighbours
// instead, a sequence is no longer than a row. Nothing is read while outputs are written, so that is
// short: several strips at a time, in runs (few_writes.h).
#pragma once
#include <atomic>
#include <optional>

#include "few_writes.h"

#if defined(C2C_TILES)
namespace c2c {

namespace tile_linear {

constexpr int64_t kHalfTile = 8;   // outputs: the least that threads share out
constexpr int64_t kNearSteps = 8;  // how far a row's reads are announced

// What threads take of the outputs, one range after another, in halves of tiles. A thread's first
// range is most of its share. Then ranges become smaller, down to half a tile: so threads end
// together, even if some are slower than others.
class Ranges {
 public:
  Ranges(int64_t outputs, int64_t threads) {
    int64_t left = outputs / kHalfTile;
    for (int64_t at = 0; left > 0;) {
      const auto tiles = int64_t(kTaken * double(left) / double(2 * threads) + 0.5);
      const int64_t size = threads == 1 ? left : std::max<int64_t>(2 * tiles, 1);
      const int64_t ranges = size > 1 ? std::min(threads, left / size) : left;
      rounds_[round_count_++] = {count_, at, size};
      count_ += ranges;
      at += ranges * size;
      left -= ranges * size;
    }
  }
  int64_t count() const { return count_; }

  Outputs operator[](int64_t range) const {
    int r = round_count_ - 1;
    while (range < rounds_[r].range) --r;
    const int64_t at = rounds_[r].at + (range - rounds_[r].range) * rounds_[r].size;
    return {at * kHalfTile, (at + rounds_[r].size) * kHalfTile};
  }

 private:
  static constexpr double kTaken = 0.6;  // of what is left, in a round of all threads

  // From a range on, and from a half of a tile on: ranges of so many halves.
  struct Round {
    int64_t range, at, size;
  };
  Round rounds_[48];
  int round_count_ = 0;
  int64_t count_ = 0;
};

// A thread's strips, range by range.
template <int NB>
class FewRows {
 public:
  FewRows(const LinearArgs& a, const TiledX& x)
      : a_(a), x_(x), row_bytes_(a.w_stride * int64_t(sizeof(bf16))), writer_(a, x.columns) {}

  // Outputs `now`, halves of tiles. `next()` says which are read after them, if any. It is asked when
  // their first lines are announced. So what is next may be taken by others until then.
  template <typename Next>
  void multiply(const Outputs now, const Next& next) {
    for (Spread spread = first(now), after; spread.gap > 0; spread = after) {
      after = first({spread.end(), now.end});
      if (spread.rows != rows_) session_.emplace(int(x_.columns), int(rows_ = spread.rows));
      const auto then = [&] { return strip(after.gap > 0 ? after : first(next()), 0); };
      spread.rows == kTile ? strips<kTile>(spread, then) : strips<kHalfTile>(spread, then);
    }
  }

 private:
  // Where rows of a tile begin, and how far they lie apart.
  struct Rows {
    const uint8_t* at;
    int64_t apart;
  };

  // The first of them: as many whole tiles as can be, or half of one. One strip, or an even number of
  // them: outputs are written in pairs.
  Spread first(const Outputs of) const {
    const int64_t tiles = (of.end - of.n) / kTile;
    if (tiles == 0) return {of.n, (of.end - of.n) / kHalfTile, kHalfTile};
    int64_t gap = tiles / 2 * 2;
    while (gap > 0 && share_set(gap * row_bytes_)) gap -= 2;
    return {of.n, std::max<int64_t>(gap, 1), kTile};
  }

  Rows strip(const Spread& of, int64_t j) const {
    const auto* w = static_cast<const uint8_t*>(a_.w);
    return {w + (of.n + j) * row_bytes_, of.gap * row_bytes_};
  }

  // Those of `now`, of so many outputs. `then()` is read after them.
  template <int Count, typename Then>
  void strips(const Spread& now, const Then& then) const {
    const int64_t ups = a_.n * row_bytes_;
    for (int64_t j = 0; j < now.gap; j += FewWriter<NB>::kStrips) {
      const int64_t count = std::min<int64_t>(now.gap - j, FewWriter<NB>::kStrips);
      for (int64_t s = 0; s < count; ++s) {
        const Rows w = strip(now, j + s), up{w.at + ups, w.apart};
        const auto after = [&] { return j + s + 1 < now.gap ? strip(now, j + s + 1) : then(); };
        if (!a_.gated) {
          walk<Count>(w, after, writer_.sums(s));
          continue;
        }
        walk<Count>(w, [&] { return up; }, writer_.sums(s));
        walk<Count>(up, after, writer_.sums(s, true));
      }
      writer_.write(now, j, count);
    }
  }

  // What is read after a strip, `after()`, is announced while its last steps are multiplied.
  template <int Count, typename After>
  void walk(const Rows& w, const After& after, float* sums) const {
    const int64_t steps = x_.steps, ahead = std::min(steps, kNearSteps);
    Position at{w.at, w.apart, x_};
    Chain<1, NB>::begin(nullptr);
    at = steps_of<Count>(at, steps - ahead, {w.at + ahead * tiles::kLine, w.apart});
    steps_of<Count>(at, ahead, after());
    Chain<1, NB>::end(sums, x_.columns);
  }

  struct Position {
    const uint8_t* w;
    int64_t apart;
    TiledX x;
  };

  template <int Count>
  static Position steps_of(Position at, int64_t count, Rows announced) {
    for (int64_t k = 0; k < count; ++k) {
      announce<Count>(announced);
      announced.at += tiles::kLine;
      const bf16* x[2] = {at.x.data, at.x.tile(1)};
      Chain<1, NB>::step(at.w, {at.w, at.apart, 0, tiles::kLine}, x, 4 * at.x.columns);
      at.w += tiles::kLine;
      at.x.data += at.x.step_size();
    }
    return at;
  }

  // A line of each row, into the first-level cache.
  template <int Count>
  static void announce(const Rows& of) {
    const uint8_t* line = of.at;
#pragma GCC unroll 16
    for (int r = 0; r < Count; ++r, line += of.apart) prefetch(line);
  }

  const LinearArgs& a_;
  const TiledX& x_;
  const int64_t row_bytes_;
  const FewWriter<NB> writer_;
  int64_t rows_ = 0;  // that tiles are configured for
  std::optional<tiles::Session> session_;
};

// All outputs that fill halves of tiles. A thread that is slower, or is held up, takes fewer ranges.
// It takes the next one before it ends one: reading goes on from one to the other.
template <int NB>
void few_rows(ThreadPool& pool, const LinearArgs& a, const TiledX& x, int64_t threads) {
  const Ranges ranges(a.n, threads);
  const int64_t count = ranges.count(), parts = std::min(threads, count);
  std::atomic<int64_t> taken{parts};
  pool.run(int(parts), [&](int part, int) {
    FewRows<NB> rows(a, x);
    for (int64_t range = part; range < count;)
      rows.multiply(ranges[range], [&] {
        range = count > parts ? taken.fetch_add(1, std::memory_order_relaxed) : count;
        return range < count ? ranges[range] : Outputs{};
      });
  });
}

}  // namespace tile_linear

}  // namespace c2c
#endif
