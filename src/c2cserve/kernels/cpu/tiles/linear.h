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
#include <vector>

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

constexpr int64_t kStripsEach = 6;          // of a thread, at least
constexpr int64_t kWorthParts = 1'000'000;  // multiplications of a thread: it takes several parts
constexpr int64_t kPartShares = 3;          // of what is left for each thread, one is taken

// Into how many blocks the rows are cut: more than the cache asks for, if threads would have so few
// strips that one more or less is much of their work.
inline int64_t row_blocks(const LinearArgs& a, int64_t rows_most, int64_t threads) {
  const int64_t strips = (a.n + strip_outputs(a) - 1) / strip_outputs(a);
  const int64_t pairs = (a.m + 2 * kTile - 1) / (2 * kTile);
  const int64_t least = (a.m + rows_most - 1) / rows_most;
  int64_t blocks = least;
  while (threads > 1 && strips * blocks < kStripsEach * threads &&
         2 * blocks <= std::min(pairs, 4 * least))
    blocks *= 2;
  return blocks;
}

// Outputs of a block of rows, which a thread takes at once.
struct Part {
  int64_t block;
  Outputs outputs;
};

// All of the work, block by block. Parts become smaller, down to a strip: so threads end together,
// even if some are slower than others. Of little work each thread has a part.
inline std::vector<Part> parts_of(const LinearArgs& a, int64_t blocks, int64_t threads) {
  const int64_t unit = strip_outputs(a), strips = (a.n + unit - 1) / unit, all = strips * blocks;
  const bool little = multiplications(a) < kWorthParts * threads;
  const int64_t each = (all + threads - 1) / threads;
  std::vector<Part> parts;
  for (int64_t at = 0; at < all;) {
    const int64_t strip = at % strips;
    const int64_t share = little ? each : (all - at) / (kPartShares * threads);
    const int64_t end = threads == 1 ? strips : strip + std::max<int64_t>(share, 1);
    const int64_t until = std::min(end, strips);
    parts.push_back({at / strips, {strip * unit, std::min(until * unit, a.n)}});
    at += until - strip;
  }
  return parts;
}

// More rows than a few, or columns that fill no tile. A thread that is slower, or is held up, takes
// fewer parts. It takes the next one before it ends one: reading goes on from one to the other.
inline void many_rows(ThreadPool& pool, const LinearArgs& a, const TiledX& x, int64_t threads) {
  const bool in_place = !pool.copies_strips && rows_in_place(a);
  const int64_t blocks = row_blocks(a, block_rows(x), threads);
  const int64_t pairs = (a.m + 2 * kTile - 1) / (2 * kTile);
  const std::vector<Part> parts = parts_of(a, blocks, threads);
  const auto count = int64_t(parts.size()), at_once = std::min(threads, count);
  std::atomic<int64_t> taken{at_once};
  pool.run(int(at_once), [&](int thread, int) {
    const tiles::Session session(int(x.columns));
    for (int64_t i = thread; i < count;) {
      const int64_t block = parts[size_t(i)].block;
      const int64_t m0 = pairs * block / blocks * 2 * kTile;
      const int64_t m1 = std::min(pairs * (block + 1) / blocks * 2 * kTile, a.m);
      RowsBlock rows(a, x, in_place, m0, m1, Buffers::of_thread());
      const auto here = [&] { return i < count && parts[size_t(i)].block == block; };
      while (here())
        rows.outputs(parts[size_t(i)].outputs, [&] {
          i = taken.fetch_add(1, std::memory_order_relaxed);
          return here() ? parts[size_t(i)].outputs : Outputs{};
        });
      rows.finish();
    }
  });
}

inline void by_tiles(ThreadPool& pool, const LinearArgs& a) {
  const TiledX x = pack(pool, a);
  const int64_t threads = multiplications(a) < kWorthHelpers ? 1 : pool.size();
  if (a.m > kFewRows || a.k % kStepColumns != 0) return many_rows(pool, a, x, threads);
  const auto few = a.m <= kTile ? few_rows<1> : few_rows<2>;
  if (a.n >= kHalfTile) few(pool, a, x, threads);
  const int64_t done = a.n / kHalfTile * kHalfTile;  // the rest fills no half of a tile: it is copied
  if (done == a.n) return;
  const tiles::Session session(int(x.columns));
  RowsBlock rest(a, x, false, 0, a.m, Buffers::of_thread());
  rest.outputs({done, a.n}, [] { return Outputs{}; });
  rest.finish();
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
