// `linear` on AMX tiles, for weights in bf16. Rows of w are the tiles' rows, so w needs no copy in
// another layout; x is rounded to bf16 and packed in pairs of columns, once per call.
//
//   A = w [16 outputs][32 columns]      B = x [16 pairs of columns][16 rows]      C = out^T
//
// An output is a chain over the columns, 32 at a time, from the first to the last. Blocking only
// decides which outputs are computed together, and sums that are parked keep their bits.
//
//   up to 32 rows   w is read in place (few_rows.h): the speed of memory
//   more            a strip's columns, `depth` at a time, are copied to the first-level cache (rows
//                   of w are often a power of two apart, where few lines of a cache serve them) and
//                   meet all rows of the block
#pragma once
#include "few_rows.h"

#if defined(C2C_TILES)
namespace c2c {

namespace tile_linear {

constexpr int64_t kBlockRows = 512;     // rows of x that meet a strip before it is dropped
constexpr int64_t kPanelStrips = 8;     // strips of 32 that share the columns of a block of x
constexpr int64_t kDepthSteps = 16;     // of 32 columns: 32 strips of them are 32 KiB

// ---- many rows: a copy of a strip's columns at a time -----------------------------------------

// Columns [step, step + count) of a strip, in tiles: [step][tile][16][32], zeros where w ends.
inline void copy_strip(const LinearArgs& a, const Strip& strip, int64_t step, int64_t count,
                       uint8_t* out) {
  const int64_t k = step * kStepColumns, columns = std::min(count * kStepColumns, a.k - k);
  const int64_t whole = columns / kStepColumns, rest = columns % kStepColumns;
  for (int64_t r = 0; r < strip.tiles * kTile; ++r) {
    const auto* in = static_cast<const bf16*>(a.w) + (strip.n + r) * a.w_stride + k;
    uint8_t* to = out + r * tiles::kLine;
    const int64_t hop = strip.tiles * tiles::kBytes;
    if (r >= strip.count) {
      for (int64_t s = 0; s < count; ++s) std::memset(to + s * hop, 0, tiles::kLine);
      continue;
    }
    for (int64_t s = 0; s < whole; ++s)
      std::memcpy(to + s * hop, in + s * kStepColumns, tiles::kLine);
    if (rest) {
      std::memset(to + whole * hop, 0, tiles::kLine);
      std::memcpy(to + whole * hop, in + whole * kStepColumns, size_t(rest) * sizeof(bf16));
    }
  }
}

// Steps [0, count) of a copy and tiles of x.
template <int NA, int NB>
inline void walk(const Source& s, const TiledX& x, const bf16* const (&from)[NB], int64_t count) {
  const bf16* at[NB];
  for (int b = 0; b < NB; ++b) at[b] = from[b];
  const uint8_t* w = s.at;
  const int64_t line = 4 * x.columns;
  for (int64_t k = 0; k < count; ++k, w += s.step) {
    Chain<NA, NB>::step(w, s, at, line);
    for (int b = 0; b < NB; ++b) at[b] += x.step_size();
  }
}

// A block of rows of x with a range of outputs.
class Block {
 public:
  Block(const LinearArgs& a, const TiledX& x, int64_t m0, int64_t m1, Buffers& buffers)
      : a_(a), x_(x), first_(m0 / kTile), tiles_((m1 - m0 + kTile - 1) / kTile), buffers_(buffers) {
    const int64_t visits = (x.steps + kDepthSteps - 1) / kDepthSteps;
    depth_ = (x.steps + visits - 1) / visits;
    copy_ = reinterpret_cast<uint8_t*>(buffers.copy.room(depth_ * 2 * tiles::kBytes / 4));
    if (visits > 1) parked_ = buffers.parked.room(kPanelStrips * pairs() * kPairSums);
  }

  void outputs(int64_t n0, int64_t n1) {
    for (int64_t n = n0; n < n1; n += kPanelStrips * kStrip)
      panel(n, std::min(n + kPanelStrips * kStrip, n1), n1);
  }

 private:
  static constexpr int64_t kStrip = 2 * kTile, kPairSums = 4 * kTile * kTile;
  int64_t pairs() const { return (tiles_ + 1) / 2; }

  void panel(int64_t n0, int64_t n1, int64_t end) {
    for (int64_t step = 0; step < x_.steps; step += depth_)
      for (int64_t n = n0; n < n1; n += kStrip)
        strip(Strip(a_, n, std::min(n + kStrip, n1)), step, (n - n0) / kStrip,
              next_of(n0, n, n1, end, step));
  }

  // What is read after strip `n` of panel [n0, n1), as far as it is whole.
  Announcer next_of(int64_t n0, int64_t n, int64_t n1, int64_t end, int64_t step) const {
    int64_t next = n + kStrip;
    if (next >= n1) {
      step += depth_;
      next = n0;
      if (step >= x_.steps) step = 0, next = n1;
    }
    if (next + kStrip > end) return {};
    const auto* w = static_cast<const bf16*>(a_.w) + next * a_.w_stride + step * kStepColumns;
    return {reinterpret_cast<const uint8_t*>(w), a_.w_stride * int64_t(sizeof(bf16)), kStrip,
            std::min(depth_, x_.steps - step)};
  }

  void strip(const Strip& strip, int64_t step, int64_t index, Announcer next) {
    const int64_t count = std::min(depth_, x_.steps - step);
    copy_strip(a_, strip, step, count, copy_);
    const int64_t pace = (next.left() + pairs() - 1) / pairs();
    for (int64_t p = 0; p < pairs(); ++p) {
      next.announce(pace);
      float* parked = parked_ ? parked_ + (index * pairs() + p) * kPairSums : nullptr;
      if (2 * p + 1 < tiles_)
        visit_of<2>(strip, step, count, p, parked);
      else
        visit_of<1>(strip, step, count, p, parked);
    }
  }

  template <int NB>
  void visit_of(const Strip& strip, int64_t step, int64_t count, int64_t pair, float* parked) {
    if (strip.tiles == 2)
      visit<2, NB>(strip, step, count, pair, parked);
    else
      visit<1, NB>(strip, step, count, pair, parked);
  }

  template <int NA, int NB>
  void visit(const Strip& strip, int64_t step, int64_t count, int64_t pair, float* parked) {
    const int64_t tile = first_ + 2 * pair;
    const bf16* from[NB];
    for (int b = 0; b < NB; ++b) from[b] = x_.tile(tile + b) + step * x_.step_size();
    Chain<NA, NB>::begin(step > 0 ? parked : nullptr);
    const Source source{copy_, tiles::kLine, tiles::kBytes, NA * tiles::kBytes};
    walk<NA, NB>(source, x_, from, count);
    const bool last = step + count == x_.steps;
    Chain<NA, NB>::end(last ? buffers_.sums : parked);
    if (last) write_strip<NA, NB>(a_, strip, buffers_.sums, tile * kTile);
  }

  const LinearArgs& a_;
  const TiledX& x_;
  const int64_t first_, tiles_;  // of x
  Buffers& buffers_;
  int64_t depth_;
  uint8_t* copy_;
  float* parked_ = nullptr;
};

// ---- sharing out ------------------------------------------------------------------------------

// A tile of x in pairs: rows [m, m + rows), columns [k, k + 32), zeros where they end.
inline void pack_tile(const LinearArgs& a, int64_t m, int64_t rows, int64_t k, int columns,
                      bf16* out) {
  alignas(64) uint32_t lines[kTile * kTile];
  for (int64_t r = 0; r < columns; ++r) {
    auto* line = reinterpret_cast<bf16*>(lines + r * kTile);
    float padded[kStepColumns] = {};
    const float* in = a.x + (m + r) * a.x_stride + k;
    if (r >= rows || k + kStepColumns > a.k) {
      if (r < rows) std::memcpy(padded, in, size_t(a.k - k) * sizeof(float));
      in = padded;
    }
    for (int c = 0; c < kStepColumns; c += 2 * kLanes)
      round_pair(line + c, load(in + c), load(in + c + kLanes));
  }
  transpose16(reinterpret_cast<uint32_t*>(out), columns, lines, kTile, columns, kTile);
}

inline TiledX pack(ThreadPool& pool, const LinearArgs& a) {
  TiledX x{nullptr, (a.k + kStepColumns - 1) / kStepColumns, std::min<int64_t>(a.m, kTile)};
  const int64_t count = (a.m + kTile - 1) / kTile * x.steps;
  auto* data = reinterpret_cast<bf16*>(pool.scratch(count * x.step_size() / 2));
  x.data = data;
  pool.run(a.m * a.k < 100'000 ? 1 : pool.size(), [&](int part, int all) {
    for (int64_t i = count * part / all; i < count * (part + 1) / all; ++i) {
      const int64_t m = i / x.steps * kTile, k = i % x.steps * kStepColumns;
      const int64_t rows = std::min<int64_t>(kTile, a.m - m);
      pack_tile(a, m, rows, k, int(x.columns), data + i * x.step_size());
    }
  });
  return x;
}

// Into how many blocks of rows the work is cut: one, unless strips alone would leave threads idle.
inline int64_t row_blocks(const LinearArgs& a, int threads) {
  const int64_t strips = (a.n + 2 * kTile - 1) / (2 * kTile);
  const int64_t pairs = (a.m + 2 * kTile - 1) / (2 * kTile);
  const int64_t least = (a.m + kBlockRows - 1) / kBlockRows;
  int64_t best = least;
  double best_used = 0.0;
  for (int64_t blocks = least; blocks <= std::min<int64_t>(pairs, 4 * least); blocks *= 2) {
    const int64_t units = strips * blocks, rounds = (units + threads - 1) / threads;
    const double used = double(units) / double(rounds * threads);
    if (used > best_used + 0.1) best = blocks, best_used = used;
  }
  return best;
}

// Outputs [n0, n1) of rows [m0, m1).
inline void outputs(const LinearArgs& a, const TiledX& x, FewRows way, int64_t m0, int64_t m1,
                    int64_t n0, int64_t n1) {
  const tiles::Session session(int(x.columns));
  Buffers& buffers = Buffers::of_thread();
  if (a.m <= 2 * kTile && a.k % kStepColumns == 0)
    n0 = tiles_in_place(a, x, n0, n1, way, buffers);
  if (n0 < n1) Block(a, x, m0, m1, buffers).outputs(n0, n1);
}

inline void by_tiles(ThreadPool& pool, const LinearArgs& a, FewRows way) {
  const TiledX x = pack(pool, a);
  const int64_t tile_rows = (a.m + kTile - 1) / kTile, work = tile_rows * a.n * a.k;
  const int64_t threads = pool.size();
  if (threads == 1 || work < 100'000) {
    for (int64_t m = 0; m < a.m; m += kBlockRows)
      outputs(a, x, way, m, std::min(m + kBlockRows, a.m), 0, a.n);
    return;
  }
  const int64_t blocks = row_blocks(a, int(threads)), pairs = (tile_rows + 1) / 2;
  const int64_t unit = a.m <= 2 * kTile ? kTile : 2 * kTile, units = (a.n + unit - 1) / unit;
  const int64_t fine = std::clamp<int64_t>(work / threads / 1'000'000, 1, 4);
  const int64_t ranges = std::min<int64_t>(units, (threads * fine + blocks - 1) / blocks);
  pool.each(blocks * ranges, [&](int64_t i) {
    const int64_t block = i / ranges, range = i % ranges;
    const int64_t m0 = pairs * block / blocks * 2 * kTile;
    const int64_t m1 = std::min(pairs * (block + 1) / blocks * 2 * kTile, a.m);
    const int64_t n0 = units * range / ranges * unit;
    const int64_t n1 = std::min(units * (range + 1) / ranges * unit, a.n);
    if (m0 < m1 && n0 < n1) outputs(a, x, way, m0, m1, n0, n1);
  });
}

#if defined(C2C_TILE_VECTORS)
// Few rows and whole tiles of w: body(n0, n1) for ranges of outputs.
template <typename Body>
inline void by_strips(ThreadPool& pool, const LinearArgs& a, const Body& body) {
  const int64_t strips = a.n / kTile, work = a.m * a.n * a.k, threads = pool.size();
  const int64_t fine = std::clamp<int64_t>(work / threads / 1'000'000, 1, 4);
  const int64_t ranges = work < 100'000 ? 1 : std::min(strips, threads * fine);
  pool.each(ranges, [&](int64_t i) {
    body(strips * i / ranges * kTile, strips * (i + 1) / ranges * kTile);
  });
}

inline void by_vectors(ThreadPool& pool, const LinearArgs& a) {
  const float* x = pack_rows(pool, a);
  by_strips(pool, a, [&](int64_t n0, int64_t n1) { vectors_in_place(a, x, n0, n1); });
}

inline void by_rows(ThreadPool& pool, const LinearArgs& a) {
  const AlongX x = pack_along(pool, a);
  by_strips(pool, a, [&](int64_t n0, int64_t n1) { along_of(a.m, a, x, n0, n1); });
}
#endif

}  // namespace tile_linear

inline void linear_tiles(ThreadPool& pool, const LinearArgs& a, FewRows way = FewRows::chosen) {
  using namespace tile_linear;
  if (way == FewRows::chosen) way = kFewRows;
#if defined(C2C_TILE_VECTORS)
  const bool whole = a.n % kTile == 0 && a.k % kStepColumns == 0;
  if (way == FewRows::vectors && a.m <= kVectorRows && whole) return by_vectors(pool, a);
  if (way == FewRows::along && a.m <= kAlongRows && whole) return by_rows(pool, a);
#endif
  by_tiles(pool, a, way);
}

}  // namespace c2c
#endif
