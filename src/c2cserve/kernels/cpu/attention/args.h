// What attention works on, whichever units multiply.
#pragma once
#include <algorithm>
#include <limits>

#include "../kv.h"
#include "../tiles/tiled_x.h"

namespace c2c {

constexpr int kTileLanes = 16;
constexpr int kTaskRows = 16;   // query x head of the group: what one task carries
constexpr int64_t kSplit = 64;  // blocks: 1024 tokens

struct AttentionArgs {
  KvArgs kv;
  const float* q;  // [T, heads * head_dim], row stride q_stride
  int64_t q_stride;
  float* out;                  // [T, heads * head_dim], dense
  const int32_t* q_start;      // [S + 1]
  const int32_t* context_len;  // [S], tokens in the cache, those of this step included
  const int64_t* block_table;  // [S, table_stride], byte offsets into the arena
  int64_t table_stride, seqs, tokens, heads;
  float scale;
  int64_t window;  // tokens a query sees, 0 for all
  bf16* tiled_out = nullptr;  // on tiles: instead of `out`, as tiles of x are loaded

  // Where a token of this step stands in its sequence.
  int64_t position(int64_t seq, int64_t token) const {
    return context_len[seq] - (q_start[seq + 1] - token);
  }
  // The first key that is seen from there.
  int64_t first_key(int64_t position) const {
    return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
  }
};

struct RowState {
  const float* q;
  int64_t position;
  int64_t first;  // first key it sees
  float peak, total;
  // On tiles the total follows the dimensions, as one more tile.
  alignas(64) float acc[kHeadMax + kTileLanes];

  void clear(int64_t dim) {
    peak = -std::numeric_limits<float>::infinity();
    total = 0.0f;
    std::memset(acc, 0, size_t(padded(dim) + kTileLanes) * sizeof(float));
  }
  static int64_t padded(int64_t dim) { return (dim + kTileLanes - 1) / kTileLanes * kTileLanes; }
};

// Queries [query, query + count) of a sequence, some heads of one kv head's group, some splits.
struct Task {
  int64_t seq, query, count, head, group_from, group_to, split_from, split_to;
  bool by_tiles = false;  // its rows are computed by tiles of x: of a prompt, on tiles
  int rows() const { return int(count * (group_to - group_from)); }
};

}  // namespace c2c
