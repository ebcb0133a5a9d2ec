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

// What threads take of the outputs, one range after another: whole tiles, or halves of them.
class Ranges {
 public:
  Ranges(const LinearArgs& a, int64_t threads) {
    const int64_t halves = a.n / kHalfTile, bytes = a.n * a.k * (a.gated ? 4 : 2);
    const int64_t each = std::clamp<int64_t>(bytes / threads / kRangeBytes, 1, kRangesMost);
    count_ = threads == 1 ? 1 : threads * each;
    // If a thread takes one range of few tiles, one tile more or less is much of it.
    const bool uneven = each == 1 && halves % (2 * threads) != 0 && halves <= 32 * threads;
    unit_ = halves % 2 != 0 || (threads > 1 && uneven) ? kHalfTile : kTile;
    units_ = halves * kHalfTile / unit_;
    count_ = std::min(count_, units_);
  }
  int64_t count() const { return count_; }
  int64_t begin(int64_t range) const { return units_ * range / count_ * unit_; }

 private:
  static constexpr int64_t kRangeBytes = 128 << 10, kRangesMost = 32;  // of a thread
  int64_t unit_, units_, count_;
};

// A thread's strips, range by range.
template <int NB>
class FewRows {
 public:
  FewRows(const LinearArgs& a, const TiledX& x)
      : a_(a), x_(x), row_bytes_(a.w_stride * int64_t(sizeof(bf16))), writer_(a, x.columns) {}

  // Outputs [n, n1), halves of tiles. Those of [after, end) are read next, if there are any.
  void multiply(int64_t n, int64_t n1, int64_t after, int64_t end) {
    for (Spread now = first(n, n1), next; now.gap > 0; now = next) {
      next = first(now.end(), n1);
      if (now.rows != rows_) session_.emplace(int(x_.columns), int(rows_ = now.rows));
      const auto strips = now.rows == kTile ? &FewRows::strips<kTile> : &FewRows::strips<kHalfTile>;
      (this->*strips)(now, strip(next.gap > 0 ? next : first(after, end), 0));
    }
  }

 private:
  // Where rows of a tile begin, and how far they lie apart.
  struct Rows {
    const uint8_t* at;
    int64_t apart;
  };

  // The first of [n, n1): as many whole tiles as can be, or half of one. One strip, or an even number
  // of them: outputs are written in pairs.
  Spread first(int64_t n, int64_t n1) const {
    const int64_t tiles = (n1 - n) / kTile;
    if (tiles == 0) return {n, (n1 - n) / kHalfTile, kHalfTile};
    int64_t gap = tiles / 2 * 2;
    while (gap > 0 && share_set(gap * row_bytes_)) gap -= 2;
    return {n, std::max<int64_t>(gap, 1), kTile};
  }

  Rows strip(const Spread& of, int64_t j) const {
    const auto* w = static_cast<const uint8_t*>(a_.w);
    return {w + (of.n + j) * row_bytes_, of.gap * row_bytes_};
  }

  // Those of `now`, of so many outputs. `next` is read after them.
  template <int Outputs>
  void strips(const Spread& now, const Rows& next) const {
    const int64_t ups = a_.n * row_bytes_;
    for (int64_t j = 0; j < now.gap; j += FewWriter<NB>::kStrips) {
      const int64_t count = std::min<int64_t>(now.gap - j, FewWriter<NB>::kStrips);
      for (int64_t s = 0; s < count; ++s) {
        const Rows w = strip(now, j + s);
        const Rows after = j + s + 1 < now.gap ? strip(now, j + s + 1) : next;
        walk<Outputs>(w, after, writer_.sums(s));
        if (a_.gated)
          walk<Outputs>({w.at + ups, w.apart}, {after.at + ups, after.apart},
                        writer_.sums(s, true));
      }
      writer_.write(now, j, count);
    }
  }

  // What is read after a strip is announced while its last steps are multiplied.
  template <int Outputs>
  void walk(const Rows& w, const Rows& after, float* sums) const {
    const int64_t steps = x_.steps, ahead = std::min(steps, kNearSteps);
    Position at{w.at, w.apart, x_};
    Chain<1, NB>::begin(nullptr);
    at = steps_of<Outputs>(at, steps - ahead, {w.at + ahead * tiles::kLine, w.apart});
    steps_of<Outputs>(at, ahead, after);
    Chain<1, NB>::end(sums, x_.columns);
  }

  struct Position {
    const uint8_t* w;
    int64_t apart;
    TiledX x;
  };

  template <int Outputs>
  static Position steps_of(Position at, int64_t count, Rows announced) {
    for (int64_t k = 0; k < count; ++k) {
      announce<Outputs>(announced);
      announced.at += tiles::kLine;
      const bf16* x[2] = {at.x.data, at.x.tile(1)};
      Chain<1, NB>::step(at.w, {at.w, at.apart, 0, tiles::kLine}, x, 4 * at.x.columns);
      at.w += tiles::kLine;
      at.x.data += at.x.step_size();
    }
    return at;
  }

  // A line of each row, into the first-level cache.
  template <int Outputs>
  static void announce(const Rows& of) {
    const uint8_t* line = of.at;
#pragma GCC unroll 16
    for (int r = 0; r < Outputs; ++r, line += of.apart) prefetch(line);
  }

  const LinearArgs& a_;
  const TiledX& x_;
  const int64_t row_bytes_;
  const FewWriter<NB> writer_;
  int64_t rows_ = 0;  // that tiles are configured for
  std::optional<tiles::Session> session_;
};

// All outputs that fill halves of tiles. A thread that is slower, or is held up, takes fewer ranges.
// It takes the next one before it begins one: reading goes on from one to the other.
template <int NB>
void few_rows(ThreadPool& pool, const LinearArgs& a, const TiledX& x, int64_t threads) {
  const Ranges ranges(a, threads);
  const int64_t count = ranges.count(), parts = std::min(threads, count);
  std::atomic<int64_t> taken{parts};
  pool.run(int(parts), [&](int part, int) {
    FewRows<NB> rows(a, x);
    for (int64_t range = part, next; range < count; range = next) {
      next = count > parts ? taken.fetch_add(1, std::memory_order_relaxed) : count;
      rows.multiply(ranges.begin(range), ranges.begin(range + 1),
                    ranges.begin(std::min(next, count)), ranges.begin(std::min(next + 1, count)));
    }
  });
}

}  // namespace tile_linear

}  // namespace c2c
#endif
