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
// instead, a sequence is no longer than a row.
#pragma once
#include <atomic>
#include <optional>

#include "strips.h"

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

// `gap` strips of `rows` outputs. The first has outputs n, n + gap, n + 2 gap and so on, the next one
// those behind them.
struct Spread {
  int64_t n, gap, rows;

  int64_t end() const { return n + gap * rows; }
};

// A thread's strips, range by range.
template <int NB>
class FewRows {
 public:
  FewRows(const LinearArgs& a, const TiledX& x)
      : a_(a), x_(x), row_bytes_(a.w_stride * int64_t(sizeof(bf16))),
        sums_(Buffers::of_thread().sums) {}

  // Outputs [n, n1), halves of tiles. Those of [after, end) are read next, if there are any.
  void multiply(int64_t n, int64_t n1, int64_t after, int64_t end) {
    for (Spread now = first(n, n1), next; now.gap > 0; now = next) {
      next = first(now.end(), n1);
      multiply(now, next.gap > 0 ? next : first(after, end));
    }
  }

 private:
  // Where rows of a tile begin, and how far they lie apart.
  struct Rows {
    const uint8_t* at;
    int64_t apart;
  };

  // The first of [n, n1): as many whole tiles as can be, or half of one.
  Spread first(int64_t n, int64_t n1) const {
    const int64_t tiles = (n1 - n) / kTile;
    if (tiles == 0) return {n, (n1 - n) / kHalfTile, kHalfTile};
    return {n, crowded(tiles) ? tiles - 1 : tiles, kTile};
  }

  // Whether rows that lie so far apart share lines of the cache, where rows less far apart do not.
  bool crowded(int64_t gap) const {
    return gap > 1 && share_lines(gap * row_bytes_) && !share_lines(row_bytes_);
  }

  Rows strip(const Spread& of, int64_t j) const {
    const auto* w = static_cast<const uint8_t*>(a_.w);
    return {w + (of.n + j) * row_bytes_, of.gap * row_bytes_};
  }

  void multiply(const Spread& now, const Spread& next) {
    if (now.rows != rows_) session_.emplace(int(x_.columns), int(rows_ = now.rows));
    for (int64_t j = 0; j < now.gap; ++j) {
      const Rows w = strip(now, j), after = j + 1 < now.gap ? strip(now, j + 1) : strip(next, 0);
      walk(w, after, sums_);
      if (a_.gated) {
        const int64_t ups = a_.n * row_bytes_;
        walk({w.at + ups, w.apart}, {after.at + ups, after.apart}, sums_ + NB * kTile * kTile);
      }
      write_strip(a_, Strip(a_, now.n + j, now.n + j + now.rows, now.gap), sums_, NB, 0);
    }
  }

  void walk(const Rows& w, const Rows& after, float* sums) const {
    const bf16* x[NB];
    for (int b = 0; b < NB; ++b) x[b] = x_.tile(b);
    Chain<1, NB>::begin(nullptr);
    for (int64_t k = 0; k < x_.steps; ++k) {
      const int64_t near = k + kNearSteps, beyond = near - x_.steps;
      announce(beyond < 0 ? w : after, beyond < 0 ? near : std::min(beyond, x_.steps - 1));
      const uint8_t* line = w.at + k * tiles::kLine;
      Chain<1, NB>::step(line, {line, w.apart, 0, tiles::kLine}, x, 4 * x_.columns);
      for (int b = 0; b < NB; ++b) x[b] += x_.step_size();
    }
    Chain<1, NB>::end(sums);
  }

  // A line of each row, into the first-level cache.
  void announce(const Rows& w, int64_t step) const {
    const uint8_t* line = w.at + step * tiles::kLine;
    for (int64_t r = 0; r < rows_; ++r, line += w.apart) prefetch(line);
  }

  const LinearArgs& a_;
  const TiledX& x_;
  const int64_t row_bytes_;
  float* const sums_;
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
