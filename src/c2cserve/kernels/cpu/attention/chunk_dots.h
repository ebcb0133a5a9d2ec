// The products of a chunk of attention with AVX-512's bf16 dot products, which read the cache's pairs
// as they lie.
#pragma once
#include "chunks.h"

namespace c2c::chunks {

class Units {
 public:
  struct Session {
    Session(int, int) {}
  };
  static constexpr bool kAddTotals = false;

  void take(const Chunk&) {}

  void score(const Chunk& chunk, Rows& rows) const {
    const bool whole = chunk.holds(0) && chunk.holds(kBlocks - 1);
    by_rows(rows, [&](auto together, int r) {
      constexpr int R = decltype(together)::value;
      if (whole) return scores<R, kBlocks>(chunk, rows, r, 0);
      for (int block = 0; block < kBlocks; ++block)
        if (chunk.holds(block)) scores<R, 1>(chunk, rows, r, block);
    });
  }

  void gather(const Chunk& chunk, Rows& rows) const {
    by_rows(rows, [&](auto together, int r) {
      constexpr int R = decltype(together)::value;
      int64_t d = 0;
      for (; d + kWide * kLanes <= chunk.dim; d += kWide * kLanes)
        sums<R, kWide>(chunk, rows, r, d, first_pairs(kLanes));
      for (; d < chunk.dim; d += kLanes)
        sums<R, 1>(chunk, rows, r, d, first_pairs(chunk.dim - d));
    });
  }

 private:
  static constexpr int kWide = 4;  // vectors of dimensions at once

  // Rows that share loads: four, then two, then one.
  template <typename Body>
  static void by_rows(const Rows& rows, const Body& body) {
    int r = 0;
    for (; r + 4 <= rows.count; r += 4) body(std::integral_constant<int, 4>(), r);
    for (; r + 2 <= rows.count; r += 2) body(std::integral_constant<int, 2>(), r);
    if (r < rows.count) body(std::integral_constant<int, 1>(), r);
  }

  static __m512i pair(const bf16* p) {
    int32_t both;
    std::memcpy(&both, p, sizeof(both));
    return _mm512_set1_epi32(both);
  }

  template <int R, int B>
  static void scores(const Chunk& chunk, const Rows& rows, int r, int block) {
    __m512 acc[R][B];
    for (int i = 0; i < R; ++i)
      for (int b = 0; b < B; ++b) acc[i][b] = _mm512_setzero_ps();
    for (int64_t d = 0; d < chunk.dim; d += 2) {
      __m512i keys[B];
      for (int b = 0; b < B; ++b) {
        const bf16* k = chunk.k[block + b] + d * kBlock;
        keys[b] = _mm512_loadu_si512(k);
        prefetch_early(k + chunk.next[block + b]);
      }
      for (int i = 0; i < R; ++i) {
        const __m512i q = pair(rows.q + (r + i) * rows.width + d);
        for (int b = 0; b < B; ++b)
          acc[i][b] = _mm512_dpbf16_ps(acc[i][b], (__m512bh)q, (__m512bh)keys[b]);
      }
    }
    for (int i = 0; i < R; ++i)
      for (int b = 0; b < B; ++b)
        _mm512_storeu_ps(rows.scores + (r + i) * kKeys + (block + b) * kBlock, acc[i][b]);
  }

  // D vectors of R rows' sums, from dimension `d` on; `lanes`: those of them that are there.
  template <int R, int D>
  static void sums(const Chunk& chunk, Rows& rows, int r, int64_t d, uint32_t lanes) {
    __m512 acc[R][D];
    for (int i = 0; i < R; ++i)
      for (int j = 0; j < D; ++j)
        acc[i][j] = mul(load(rows.rows[r + i].acc + d + j * kLanes), splat(rows.shrink[r + i])).v;
    for (int key = chunk.from / 2 * 2; key < chunk.to; key += 2) {
      const bf16* pairs = chunk.values(key) + 2 * d;
      const uint32_t seen = chunk.seen(key) & lanes;
      __m512i values[D];
      for (int j = 0; j < D; ++j) {
        const bf16* at = pairs + 2 * j * kLanes;
        values[j] = ~seen ? load_pairs(at, seen) : _mm512_loadu_si512(at);
        prefetch_early(at + chunk.next[key / kBlock]);
      }
      for (int i = 0; i < R; ++i) {
        const __m512i weight = pair(rows.weights + (r + i) * kKeys + key);
        for (int j = 0; j < D; ++j)
          acc[i][j] = _mm512_dpbf16_ps(acc[i][j], (__m512bh)weight, (__m512bh)values[j]);
      }
    }
    for (int i = 0; i < R; ++i)
      for (int j = 0; j < D; ++j)
        _mm512_storeu_ps(rows.rows[r + i].acc + d + j * kLanes, acc[i][j]);
  }
};

}  // namespace c2c::chunks
