// Paged attention and its cache, for ragged prefill, chunked prefill and decode alike.
//
// A block of the arena holds 16 tokens of all layers (block-first):
//   [layer][k | v][kv head]:  K as [head_dim][16 tokens], V as [16 tokens][head_dim]
// K is transposed inside its block, so the 16 scores of a query come as whole vectors without a
// horizontal sum. Every (query, head) row walks its blocks in order with an online softmax of its
// own; rows are only worked on together to share loads. A row's bits depend on nothing else.
#pragma once
#include <cmath>
#include <limits>
#include <vector>

#include "rowwise.h"
#include "simd.h"
#include "threads.h"

namespace c2c {

constexpr int kBlock = 16;
constexpr int kHeadMax = 512;
constexpr int kTileRows = 16;  // rows (query x head of the group) one task carries

struct KvArgs {
  uint8_t* arena;
  int64_t kv_heads, head_dim, layer;
  int64_t item;  // bytes per element
};

struct AttentionArgs {
  KvArgs kv;
  const float* q;  // [T, heads * head_dim], row stride q_stride
  int64_t q_stride;
  float* out;  // [T, heads * head_dim], dense
  const int32_t* q_start;      // [S + 1]
  const int32_t* context_len;  // [S], tokens in the cache, those of this step included
  const int64_t* block_table;  // [S, table_stride], byte offsets into the arena
  int64_t table_stride, seqs, heads;
  float scale;
  int64_t window;  // tokens a query sees, 0 for all
};

inline uint8_t* kv_plane(const KvArgs& kv, int64_t block, int64_t v, int64_t head) {
  int64_t plane = (kv.layer * 2 + v) * kv.kv_heads + head;
  return kv.arena + block + plane * kBlock * kv.head_dim * kv.item;
}

struct RowState {
  const float* q;
  float* out;
  int64_t position;
  int64_t first;  // first key it sees
  float peak, total;
  float acc[kHeadMax];
};

// Scores of R rows against the 16 keys of a block: two partial sums (even and odd dimensions) per
// lane, so that a lone row does not wait for its own additions.
template <typename T, int R>
inline void block_scores(RowState* const* rows, const T* k, int64_t dim, float (*scores)[kBlock]) {
  constexpr int kParts = kBlock / kLanes;
  vec even[R][kParts], odd[R][kParts];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < kParts; ++p) even[r][p] = odd[r][p] = zero();
  int64_t d = 0;
  for (; d + 2 <= dim; d += 2)
    for (int p = 0; p < kParts; ++p) {
      vec k0 = load(k + d * kBlock + p * kLanes), k1 = load(k + (d + 1) * kBlock + p * kLanes);
      for (int r = 0; r < R; ++r) {
        even[r][p] = fma(splat(rows[r]->q[d]), k0, even[r][p]);
        odd[r][p] = fma(splat(rows[r]->q[d + 1]), k1, odd[r][p]);
      }
    }
  for (; d < dim; ++d)
    for (int p = 0; p < kParts; ++p)
      for (int r = 0; r < R; ++r)
        even[r][p] = fma(splat(rows[r]->q[d]), load(k + d * kBlock + p * kLanes), even[r][p]);
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < kParts; ++p) store(scores[r] + p * kLanes, add(even[r][p], odd[r][p]));
}

// Fold keys [from, to) of a block into one row's running softmax.
template <typename T>
inline void fold(RowState& row, float* scores, const T* v, int64_t dim, float scale, int from, int to) {
  float peak = row.peak;
  for (int j = 0; j < kBlock; ++j) {
    bool seen = j >= from && j < to;
    scores[j] = seen ? scores[j] * scale : -std::numeric_limits<float>::infinity();
    peak = scores[j] > peak ? scores[j] : peak;
  }
  float shrink = row.total == 0.0f ? 0.0f : exp1(row.peak - peak);
  float weights[kBlock];
  for (int p = 0; p < kBlock; p += kLanes)
    store(weights + p, exp(sub(load(scores + p), splat(peak))));
  row.total *= shrink;
  for (int j = from; j < to; ++j) row.total += weights[j];
  row.peak = peak;
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    vec acc = mul(load(row.acc + d), splat(shrink));
    for (int j = from; j < to; ++j) acc = fma(splat(weights[j]), load(v + j * dim + d), acc);
    store(row.acc + d, acc);
  }
  if (int rest = int(dim - d); rest > 0) {
    vec acc = mul(load_tail(row.acc + d, rest), splat(shrink));
    for (int j = from; j < to; ++j)
      acc = fma(splat(weights[j]), load_tail(v + j * dim + d, rest), acc);
    store_tail(row.acc + d, acc, rest);
  }
}

template <typename T>
void attend_rows(const AttentionArgs& a, RowState* rows, int count, const int64_t* table, int64_t kv_head) {
#if defined(__AVX512F__)
  constexpr int kTogether = 4;
#else
  constexpr int kTogether = 2;
#endif
  const int64_t dim = a.kv.head_dim;
  int64_t first = rows[0].first, last = rows[0].position;
  for (int r = 1; r < count; ++r) {
    first = rows[r].first < first ? rows[r].first : first;
    last = rows[r].position > last ? rows[r].position : last;
  }
  for (int64_t b = first / kBlock; b <= last / kBlock; ++b) {
    const T* k = reinterpret_cast<const T*>(kv_plane(a.kv, table[b], 0, kv_head));
    const T* v = reinterpret_cast<const T*>(kv_plane(a.kv, table[b], 1, kv_head));
    RowState* live[kTileRows];
    int lives = 0;
    for (int r = 0; r < count; ++r)
      if (rows[r].first < (b + 1) * kBlock && rows[r].position >= b * kBlock) live[lives++] = &rows[r];
    float scores[kTileRows][kBlock];
    int r = 0;
    for (; r + kTogether <= lives; r += kTogether)
      block_scores<T, kTogether>(live + r, k, dim, scores + r);
    for (; r < lives; ++r) block_scores<T, 1>(live + r, k, dim, scores + r);
    for (r = 0; r < lives; ++r) {
      int64_t from = live[r]->first - b * kBlock, to = live[r]->position + 1 - b * kBlock;
      fold(*live[r], scores[r], v, dim, a.scale, from < 0 ? 0 : int(from), to > kBlock ? kBlock : int(to));
    }
  }
}

template <typename T>
void attention_typed(ThreadPool& pool, const AttentionArgs& a) {
  const int64_t group = a.heads / a.kv.kv_heads, dim = a.kv.head_dim;
  const int64_t queries = group >= kTileRows ? 1 : kTileRows / group;  // queries per task
  struct Task {
    int64_t seq, query, count, head;
  };
  std::vector<Task> tasks;
  int64_t work = 0;
  for (int64_t s = 0; s < a.seqs; ++s) {
    work += int64_t(a.q_start[s + 1] - a.q_start[s]) * a.context_len[s] * a.heads * dim;
    for (int64_t q = a.q_start[s]; q < a.q_start[s + 1]; q += queries) {
      int64_t left = a.q_start[s + 1] - q;
      for (int64_t h = 0; h < a.kv.kv_heads; ++h) tasks.push_back({s, q, left < queries ? left : queries, h});
    }
  }
  auto body = [&](const Task& task) {
    RowState rows[kTileRows];
    const int64_t s = task.seq, length = a.context_len[s];
    const int64_t* table = a.block_table + s * a.table_stride;
    for (int64_t g0 = 0; g0 < group; g0 += kTileRows / task.count) {
      int count = 0;
      for (int64_t i = 0; i < task.count; ++i)
        for (int64_t g = g0; g < group && g < g0 + kTileRows / task.count; ++g) {
          RowState& row = rows[count++];
          int64_t token = task.query + i, head = task.head * group + g;
          row.q = a.q + token * a.q_stride + head * dim;
          row.out = a.out + (token * a.heads + head) * dim;
          row.position = length - (a.q_start[s + 1] - token);
          row.first = a.window > 0 && row.position >= a.window ? row.position - a.window + 1 : 0;
          row.peak = -std::numeric_limits<float>::infinity();
          row.total = 0.0f;
          std::memset(row.acc, 0, size_t(dim) * sizeof(float));
        }
      attend_rows<T>(a, rows, count, table, task.head);
      for (int r = 0; r < count; ++r)
        for (int64_t d = 0; d < dim; ++d) rows[r].out[d] = rows[r].acc[d] / rows[r].total;
    }
  };
  const int most = tasks.size() < ThreadPool::kPartsMax ? int(tasks.size()) : ThreadPool::kPartsMax;
  pool.run(work < 50'000 ? 1 : most, [&](int part, int all) {
    for (size_t i = size_t(part); i < tasks.size(); i += size_t(all)) body(tasks[i]);
  });
}

template <typename T>
void store_kv(const KvArgs& kv, int64_t block, int64_t slot, int64_t head, const float* k, const float* v) {
  T* ks = reinterpret_cast<T*>(kv_plane(kv, block, 0, head)) + slot;
  T* vs = reinterpret_cast<T*>(kv_plane(kv, block, 1, head)) + slot * kv.head_dim;
  for (int64_t d = 0; d < kv.head_dim; ++d) {
    from_float(ks[d * kBlock], k[d]);
    from_float(vs[d], v[d]);
  }
}

struct RopeStoreArgs {
  KvArgs kv;
  float* qkv;  // [T, (heads + 2 kv_heads) * head_dim], q and k rotated in place
  const int32_t* positions;
  const float *cos, *sin;        // [P, head_dim / 2]
  const float *q_norm, *k_norm;  // [head_dim] or null
  const int64_t* slots;          // [T] byte offset of the token's block * 16 + its place in it
  int64_t tokens, heads;
  float eps;
};

template <typename T>
void rope_store_typed(ThreadPool& pool, const RopeStoreArgs& a) {
  const int64_t dim = a.kv.head_dim, width = (a.heads + 2 * a.kv.kv_heads) * dim;
  int parts = a.tokens * width < 20'000 ? 1 : pool.size();
  pool.run(parts, [&](int part, int all) {
    for (int64_t t = part; t < a.tokens; t += all) {
      float* row = a.qkv + t * width;
      const float* cos = a.cos + a.positions[t] * (dim / 2);
      const float* sin = a.sin + a.positions[t] * (dim / 2);
      for (int64_t h = 0; h < a.heads + a.kv.kv_heads; ++h) {
        const float* norm = h < a.heads ? a.q_norm : a.k_norm;
        if (norm) rms_norm_row(row + h * dim, row + h * dim, norm, a.eps, dim);
        rope_head(row + h * dim, cos, sin, dim / 2);
      }
      const float* k = row + a.heads * dim;
      for (int64_t h = 0; h < a.kv.kv_heads; ++h)
        store_kv<T>(a.kv, a.slots[t] / kBlock, a.slots[t] % kBlock, h, k + h * dim,
                    k + (a.kv.kv_heads + h) * dim);
    }
  });
}

}  // namespace c2c
