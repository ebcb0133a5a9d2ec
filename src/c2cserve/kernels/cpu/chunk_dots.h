// The products of a chunk of attention with AVX-512's bf16 dot products: two rows of the cache that
// lie next to each other are interleaved as they are loaded.
#pragma once
#include "chunks.h"

namespace c2c::chunks {

class Units {
 public:
  struct Session {};
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
        sums<R, kWide>(chunk, rows, r, d, __mmask16(0xffff));
      for (; d < chunk.dim; d += kLanes) {
        const int64_t lanes = std::min<int64_t>(kLanes, chunk.dim - d);
        sums<R, 1>(chunk, rows, r, d, __mmask16((1u << lanes) - 1));
      }
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
        keys[b] = interleaved(k, k + kBlock, 0xffff);
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

  // D vectors of R rows' sums, from dimension `d` on.
  template <int R, int D>
  static void sums(const Chunk& chunk, Rows& rows, int r, int64_t d, __mmask16 lanes) {
    __m512 acc[R][D];
    for (int i = 0; i < R; ++i)
      for (int j = 0; j < D; ++j)
        acc[i][j] = mul(load(rows.rows[r + i].acc + d + j * kLanes), splat(rows.shrink[r + i])).v;
    for (int key = chunk.from / 2 * 2; key < chunk.to; key += 2) {
      const bf16 *first = chunk.values(key), *second = chunk.values(key + 1);
      const int64_t next = chunk.next[key / kBlock] + d;
      if (first) prefetch_early(first + next);
      if (second) prefetch_early(second + next);
      if (D == kWide && first) prefetch_early(first + next + 2 * kLanes);
      if (D == kWide && second) prefetch_early(second + next + 2 * kLanes);
      __m512i values[D];
      for (int j = 0; j < D; ++j)
        values[j] = interleaved(first ? first + d + j * kLanes : nullptr,
                                second ? second + d + j * kLanes : nullptr, lanes);
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
