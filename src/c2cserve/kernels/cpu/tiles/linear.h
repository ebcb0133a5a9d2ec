// `linear` on AMX tiles, for weights in bf16. Rows of w are the tiles' rows, so w needs no copy in
// another layout; x is rounded to bf16 and packed in pairs of columns, once per call.
//
//   A = w [16 outputs][32 columns]      B = x [16 pairs of columns][16 rows]      C = out^T
//
// An output is a chain over the columns, 32 at a time, from the first to the last. Blocking only
// decides which outputs are computed together, and sums that are parked keep their bits.
//
//   up to 32 rows   w is read in place (few_rows.h): the speed of memory
//   more            strips of w meet all rows of a block (many_rows.h), in place or from copies
#pragma once
#include "few_rows.h"
#include "many_rows.h"

#if defined(C2C_TILES)
namespace c2c {

namespace tile_linear {

// ---- sharing out ------------------------------------------------------------------------------

inline TiledX pack(ThreadPool& pool, const LinearArgs& a) {
  TiledX x = TiledX::of(a.m, a.k);
  if ((x.data = a.tiled_x)) return x;
  auto* data = reinterpret_cast<bf16*>(pool.scratch(tiled_size(a.m, a.k) / 2));
  pack_rows(pool, data, a.m, a.k, [&](int64_t m) { return a.x + m * a.x_stride; });
  x.data = data;
  return x;
}

// Rows of x that meet a strip before it is dropped: pairs of tiles.
inline int64_t block_rows(const TiledX& x) {
  if (x.steps > kChunkSteps) return kLongRows;
  return kWholeBytes / (2 * x.steps * tiles::kBytes) * 2 * kTile;
}

constexpr int64_t kWorthHelpers = 100'000;  // multiplications: waking helpers takes longer

// As tiles count them: one with fewer rows of x takes as long.
inline int64_t multiplications(const LinearArgs& a) {
  return (a.m + kTile - 1) / kTile * a.n * a.k * (a.gated ? 2 : 1);
}

// Into how many blocks of rows the work is cut: one, unless strips alone would leave threads idle.
inline int64_t row_blocks(const LinearArgs& a, int64_t rows_most, int threads) {
  const int64_t strips = (a.n + strip_outputs(a) - 1) / strip_outputs(a);
  const int64_t pairs = (a.m + 2 * kTile - 1) / (2 * kTile);
  const int64_t least = (a.m + rows_most - 1) / rows_most;
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
inline void outputs(const LinearArgs& a, const TiledX& x, bool in_place, int64_t m0, int64_t m1,
                    int64_t n0, int64_t n1) {
  const tiles::Session session(int(x.columns));
  RowsBlock(a, x, in_place, m0, m1, Buffers::of_thread()).outputs(n0, n1);
}

// More rows than a few, or columns that fill no tile.
inline void many_rows(ThreadPool& pool, const LinearArgs& a, const TiledX& x, int64_t threads) {
  const bool in_place = !pool.copies_strips && rows_in_place(a);
  const int64_t rows_most = block_rows(x);
  if (threads == 1) {
    for (int64_t m = 0; m < a.m; m += rows_most)
      outputs(a, x, in_place, m, std::min(m + rows_most, a.m), 0, a.n);
    return;
  }
  const int64_t tile_rows = (a.m + kTile - 1) / kTile, work = multiplications(a);
  const int64_t blocks = row_blocks(a, rows_most, int(threads)), pairs = (tile_rows + 1) / 2;
  const int64_t fine = std::clamp<int64_t>(work / threads / 1'000'000, 1, 4);
  const int64_t most = (threads * fine + blocks - 1) / blocks, unit = strip_outputs(a);
  const int64_t units = (a.n + unit - 1) / unit, ranges = std::min<int64_t>(units, most);
  pool.each(blocks * ranges, [&](int64_t i) {
    const int64_t block = i / ranges, range = i % ranges;
    const int64_t m0 = pairs * block / blocks * 2 * kTile;
    const int64_t m1 = std::min(pairs * (block + 1) / blocks * 2 * kTile, a.m);
    const int64_t n0 = units * range / ranges * unit;
    const int64_t n1 = std::min(units * (range + 1) / ranges * unit, a.n);
    if (m0 < m1 && n0 < n1) outputs(a, x, in_place, m0, m1, n0, n1);
  });
}

inline void by_tiles(ThreadPool& pool, const LinearArgs& a) {
  const TiledX x = pack(pool, a);
  const int64_t threads = multiplications(a) < kWorthHelpers ? 1 : pool.size();
  if (a.m > kFewRows || a.k % kStepColumns != 0) return many_rows(pool, a, x, threads);
  const auto few = a.m <= kTile ? few_rows<1> : few_rows<2>;
  if (a.n >= kHalfTile) few(pool, a, x, threads);
  const int64_t done = a.n / kHalfTile * kHalfTile;  // the rest fills no half of a tile: it is copied
  if (done < a.n) outputs(a, x, false, 0, a.m, done, a.n);
}

}  // namespace tile_linear

inline void linear_tiles(ThreadPool& pool, const LinearArgs& a) { tile_linear::by_tiles(pool, a); }

// `down` of what `gated` gives, which is written as tiles of x.
inline void feed_forward_tiles(ThreadPool& pool, LinearArgs gated, LinearArgs down) {
  using namespace tile_linear;
  gated.tiled_out = reinterpret_cast<bf16*>(pool.between(tiled_size(gated.m, gated.n) / 2));
  down.tiled_x = gated.tiled_out;
  clear_ends(gated.tiled_out, gated.m, gated.n);
  by_tiles(pool, gated);
  by_tiles(pool, down);
}

}  // namespace c2c
#endif
