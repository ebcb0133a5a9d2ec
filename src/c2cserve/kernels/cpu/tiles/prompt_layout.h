// Keys and values of a sequence as tiles of A. They are laid out once, for all tasks of a step that
// look at one kv head.
#pragma once
#include "../attention/chunk_rules.h"
#include "../threads.h"
#include "transpose.h"

namespace c2c::chunks {

constexpr int kTile = kRows * kWidth;    // bf16 values of A or B
constexpr int kHalves = kKeys / kWidth;  // tiles of weights

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

//   chunk   keys [block][32 dimensions][16 keys][32 dimensions]
//           values [16 dimensions][32 keys][16 dimensions][32 keys]
class Layout {
 public:
  // Of the keys that rows of this step see.
  Layout(const AttentionArgs& a, int64_t seq, int64_t head)
      : seq_(seq),
        head_(head),
        dim_(a.kv.head_dim),
        steps_((dim_ + kWidth - 1) / kWidth),
        lines_((dim_ + kRows - 1) / kRows),
        first_(a.first_key(a.position(seq, a.q_start[seq]))),
        end_(a.context_len[seq]) {}

  bool of(const Task& task) const { return task.seq == seq_ && task.head == head_; }
  int64_t chunks() const { return (end_ + kKeys - 1) / kKeys - first_ / kKeys; }
  int64_t size() const { return chunks() * chunk_size(); }  // values
  void lie_at(bf16* data) { data_ = data; }

  // The i-th chunk.
  void take(const AttentionArgs& a, int64_t i) const {
    const int64_t* table = a.block_table + seq_ * a.table_stride;
    const int64_t begin = first_ / kBlock, end = (end_ + kBlock - 1) / kBlock;
    const int64_t from = (first_ / kKeys + i) * kBlocks;
    bf16 *keys = data_ + i * chunk_size(), *values = keys + kBlocks * steps_ * kTile;
    const bf16* planes[kBlocks][2] = {};
    for (int64_t b = 0; b < kBlocks; ++b)
      for (int64_t v = 0; v < 2 && from + b >= begin && from + b < end; ++v) {
        planes[b][v] = reinterpret_cast<const bf16*>(a.kv.plane(table[from + b], v, head_));
        announce(planes[b][v], a.kv.plane_bytes());
      }
    for (int64_t b = 0; b < kBlocks; ++b)
      if (planes[b][0]) take_keys(keys + b * steps_ * kTile, planes[b][0]);
    for (int64_t half = 0; half < kHalves; ++half) {
      const int64_t first = from * kBlock + half * kWidth;
      take_values(values + half * kTile, planes[2 * half][1], planes[2 * half + 1][1],
                  first_ - first, end_ - first);
    }
  }

  const bf16* keys(int64_t chunk, int64_t block, int64_t step) const {
    return at(chunk) + (block * steps_ + step) * kTile;
  }
  const bf16* values(int64_t chunk, int64_t line, int64_t half) const {
    return at(chunk) + (kBlocks * steps_ + line * kHalves + half) * kTile;
  }

 private:
  static void announce(const bf16* plane, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64)
      prefetch_early(reinterpret_cast<const uint8_t*>(plane) + i);
  }

  int64_t chunk_size() const { return (kBlocks * steps_ + lines_ * kHalves) * kTile; }
  const bf16* at(int64_t chunk) const {
    return data_ + (chunk - first_ / kKeys) * chunk_size();
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
  void take_values(bf16* out, const bf16* low, const bf16* high, int64_t from, int64_t to) const {
    for (int64_t t = 0; t < lines_; ++t) {
      const bf16* lines[16];
      uint32_t masks[16];
      for (int64_t p = 0; p < 16; ++p) {
        const int64_t key = 2 * p;
        masks[p] = pairs_seen(key, from, to) & first_pairs(dim_ - t * kRows);
        lines[p] = masks[p] ? (key < kBlock ? low : high) + key % kBlock * dim_ + 2 * t * kRows
                            : nullptr;
      }
      turn_lines(out + t * kHalves * kTile, lines, masks);
    }
  }

  int64_t seq_, head_, dim_, steps_, lines_;  // of 32 and of 16 dimensions
  int64_t first_, end_;                   // keys
  bf16* data_ = nullptr;
};

}  // namespace c2c::chunks
