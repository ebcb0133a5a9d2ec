// Keys and values of a split as tiles of A, and pairs of weights as tiles of B.
#pragma once
#include "../chunk_rules.h"
#include "../threads.h"
#include "transpose.h"

namespace c2c::chunks {

constexpr int kSplitChunks = kSplit / kBlocks;
constexpr int kTile = kRows * kWidth;    // bf16 values of A or B
constexpr int kHalves = kKeys / kWidth;  // tiles of weights

inline bf16* bf16_room(Scratch& scratch, int64_t n) {
  return reinterpret_cast<bf16*>(scratch.room(n / 2));
}

// out[l][p] = pairs[p][l]: 16 lines of 16 pairs of values to a tile of A. Of each line, those of its
// mask; others are zeros.
inline void turn_lines(bf16* out, const bf16* const (&lines)[16], const uint32_t (&masks)[16]) {
#if defined(__AVX512F__)
  __m512i pairs[16];
#pragma GCC unroll 16
  for (int p = 0; p < 16; ++p) pairs[p] = load_pairs(lines[p], masks[p]);
  transpose16(pairs);
#pragma GCC unroll 16
  for (int l = 0; l < 16; ++l) _mm512_storeu_si512(out + l * kWidth, pairs[l]);
#else
  for (int l = 0; l < 16; ++l)
    for (int i = 0; i < kWidth; ++i)
      out[l * kWidth + i] = masks[i / 2] >> (2 * l + i % 2) & 1 ? lines[i / 2][2 * l + i % 2] : bf16{0};
#endif
}

class SplitLayout {
 public:
  void begin(int64_t dim) {
    dim_ = dim;
    steps_ = (dim + kWidth - 1) / kWidth;
    lines_ = (dim + kRows - 1) / kRows;
    keys_ = bf16_room(key_room_, kSplitChunks * kBlocks * steps_ * kTile);
    values_ = bf16_room(value_room_, kSplitChunks * lines_ * kHalves * kTile);
  }

  // A split, as far as rows see it: keys from `first` to `last`.
  void take(const AttentionArgs& a, const Task& task, int64_t split, int64_t first, int64_t last) {
    const int64_t* table = a.block_table + task.seq * a.table_stride;
    const int64_t begin = std::max(first / kBlock, split * kSplit);
    const int64_t end = std::min(last / kBlock + 1, (split + 1) * kSplit);
    // Pairs of blocks, up to whole chunks.
    for (int64_t pair = begin / kBlocks * kBlocks; pair < (end + kBlocks - 1) / kBlocks * kBlocks;
         pair += 2) {
      const bf16* planes[2][2] = {};
      for (int64_t i = 0; i < 2; ++i)
        if (pair + i >= begin && pair + i < end)
          for (int64_t v = 0; v < 2; ++v)
            planes[v][i] =
                reinterpret_cast<const bf16*>(a.kv.plane(table[pair + i], v, task.head));
      for (int64_t i = 0; i < 2 && pair + 2 + i < end; ++i)
        for (int64_t v = 0; v < 2; ++v)
          announce(a.kv.plane(table[pair + 2 + i], v, task.head), a.kv.plane_bytes());
      const int64_t at = pair - split * kSplit;
      for (int64_t i = 0; i < 2; ++i)
        if (planes[0][i]) take_keys(keys_ + (at + i) * steps_ * kTile, planes[0][i]);
      take_values(values_ + (at / kBlocks * lines_ * kHalves + at % kBlocks / 2) * kTile, planes[1],
                  first - pair * kBlock, last + 1 - pair * kBlock);
    }
  }

  // The chunk is counted from the first one of the split.
  const bf16* keys(int64_t chunk, int64_t block, int64_t step) const {
    return keys_ + ((chunk * kBlocks + block) * steps_ + step) * kTile;
  }
  const bf16* values(int64_t chunk, int64_t line, int64_t half) const {
    return values_ + ((chunk * lines_ + line) * kHalves + half) * kTile;
  }

 private:
  static void announce(const uint8_t* plane, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) prefetch_early(plane + i);
  }

  void take_keys(bf16* out, const bf16* plane) const {
    for (int64_t s = 0; s < steps_; ++s) {
      const bf16* lines[16];
      uint32_t masks[16];
      for (int64_t p = 0; p < 16; ++p) {
        const int64_t d = s * kWidth + 2 * p;
        lines[p] = plane + d * kBlock;
        masks[p] = d < dim_ ? ~uint32_t(0) : 0;
      }
      turn_lines(out + s * kTile, lines, masks);
    }
  }

  // Of two blocks; keys outside of [from, to) are seen by no row and count as zeros.
  void take_values(bf16* out, const bf16* const (&planes)[2], int64_t from, int64_t to) const {
    for (int64_t t = 0; t < lines_; ++t) {
      const bf16* lines[16];
      uint32_t masks[16];
      for (int64_t p = 0; p < 16; ++p) {
        const int64_t key = 2 * p;
        masks[p] = pairs_seen(key, from, to) & first_pairs(dim_ - t * kRows);
        lines[p] = masks[p] ? planes[key / kBlock] + key % kBlock * dim_ + 2 * t * kRows : nullptr;
      }
      turn_lines(out + t * kHalves * kTile, lines, masks);
    }
  }

  int64_t dim_ = 0, steps_ = 0, lines_ = 0;  // of 32 and of 16 dimensions
  Scratch key_room_, value_room_;
  bf16* keys_ = nullptr;    // [chunk][block][32 dimensions][16 keys][32 dimensions]
  bf16* values_ = nullptr;  // [chunk][16 dimensions][32 keys][16 dimensions][32 keys]
};

}  // namespace c2c::chunks
