// Paged attention for ragged prefill, chunked prefill and decode alike.
//
// Every (query, head) row reads its blocks in order, with an online softmax of its own. Blocks are
// cut at absolute token positions into splits of kSplit blocks. Each split starts a new softmax,
// and splits are merged in order, by one thread or by several. Rows are only computed together to
// share loads. So a row's bits depend on that row alone.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "attention_args.h"
#include "chunks.h"
#if defined(C2C_TILES)
#include "tiles/prompt.h"
#endif

namespace c2c {

constexpr int kTogether = 4;    // of them, rows that share the loads of a block

// The part of a block a row sees, and its keys' weights.
struct Share {
  RowState* row;
  int from, to;
  float shrink;  // of what the row has gathered so far
  float weights[kBlock];

  bool sees_as(const Share& other) const { return from == other.from && to == other.to; }
};

// body(0) for an even i, body(1) for an odd one: as constants.
template <typename Body>
C2C_INLINE inline void by_parity(int64_t i, const Body& body) {
  if (i % 2 == 0)
    body(std::integral_constant<int, 0>());
  else
    body(std::integral_constant<int, 1>());
}

// Keys of dimension d, from key `from` on; `Half` is d % 2.
template <int Half, typename T>
inline vec keys_at(const T* k, int64_t d, int from) {
  if constexpr (std::is_same_v<T, bf16>)
    return load_half<Half>(k + (d - Half) * kBlock + 2 * from);
  else
    return load(k + d * kBlock + from);
}

// Values of key j, from dimension d on; `Half` is j % 2.
template <int Half, typename T>
inline vec values_at(const T* v, int64_t dim, int64_t j, int64_t d) {
  if constexpr (std::is_same_v<T, bf16>)
    return load_half<Half>(v + (j - Half) * dim + 2 * d);
  else
    return load(v + j * dim + d);
}

// The same of the last `rest` dimensions, fewer than a vector has.
template <typename T>
inline vec last_values_at(const T* v, int64_t dim, int64_t j, int64_t d, int rest) {
  T lanes[kLanes] = {};
  for (int i = 0; i < rest; ++i)
    if constexpr (std::is_same_v<T, bf16>)
      lanes[i] = v[j / 2 * 2 * dim + 2 * (d + i) + j % 2];
    else
      lanes[i] = v[j * dim + d + i];
  return load(lanes);
}

// Scores of R rows against the 16 keys of a block, left in `weights`. `dim` is even.
template <typename T, int R>
inline void score(Share* shares, const T* k, int64_t dim) {
  constexpr int kParts = kBlock / kLanes;
  vec acc[R][kParts];
  const float* q[R];
  for (int r = 0; r < R; ++r) {
    q[r] = shares[r].row->q;
    for (int p = 0; p < kParts; ++p) acc[r][p] = zero();
  }
  const auto add = [&](auto half, int64_t d) C2C_INLINE {
    vec keys[kParts];
    for (int p = 0; p < kParts; ++p) keys[p] = held(keys_at<half()>(k, d, p * kLanes));
    for (int r = 0; r < R; ++r) {
      const vec query = splat(q[r][d]);
      for (int p = 0; p < kParts; ++p) acc[r][p] = fma(query, keys[p], acc[r][p]);
    }
  };
  for (int64_t d = 0; d < dim; d += 2) {
    add(std::integral_constant<int, 0>(), d);
    add(std::integral_constant<int, 1>(), d + 1);
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < kParts; ++p) store(shares[r].weights + p * kLanes, acc[r][p]);
}

// Scores into weights, relative to the row's peak so far.
inline void weigh(Share& s, float scale) {
  RowState& row = *s.row;
  const float hidden = -std::numeric_limits<float>::infinity();
  for (int j = 0; j < s.from; ++j) s.weights[j] = hidden;
  for (int j = s.to; j < kBlock; ++j) s.weights[j] = hidden;
  vec best = splat(row.peak);
  for (int p = 0; p < kBlock; p += kLanes) {
    vec scaled = mul(load(s.weights + p), splat(scale));
    store(s.weights + p, scaled);
    best = max(best, scaled);
  }
  const float peak = largest(best);
  for (int p = 0; p < kBlock; p += kLanes)
    store(s.weights + p, exp(sub(load(s.weights + p), splat(peak))));
  for (int j = 0; j < s.from; ++j) s.weights[j] = 0.0f;  // exp has a floor above it
  for (int j = s.to; j < kBlock; ++j) s.weights[j] = 0.0f;
  if (row.total == 0.0f)
    s.shrink = 0.0f;
  else
    s.shrink = row.peak == peak ? 1.0f : exp1(row.peak - peak);
  vec total = load(s.weights);
  for (int p = kLanes; p < kBlock; p += kLanes) total = add(total, load(s.weights + p));
  row.total = row.total * s.shrink + sum(total);
  row.peak = peak;
}

// D vectors of R rows' sums, from dimension `d` on; the rows see the same keys.
template <typename T, int R, int D>
inline void gather(const Share* shares, const T* v, int64_t dim, int64_t d) {
  vec acc[R][D];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < D; ++i)
      acc[r][i] = mul(load(shares[r].row->acc + d + i * kLanes), splat(shares[r].shrink));
  for (int j = shares[0].from; j < shares[0].to; ++j)
    by_parity(j, [&](auto half) C2C_INLINE {
      vec value[D];
      for (int i = 0; i < D; ++i) value[i] = held(values_at<half()>(v, dim, j, d + i * kLanes));
      for (int r = 0; r < R; ++r) {
        vec weight = splat(shares[r].weights[j]);
        for (int i = 0; i < D; ++i) acc[r][i] = fma(weight, value[i], acc[r][i]);
      }
    });
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < D; ++i) store(shares[r].row->acc + d + i * kLanes, acc[r][i]);
}

template <typename T, int R>
inline void gather_rows(const Share* shares, const T* v, int64_t dim) {
  int64_t d = 0;
  constexpr int kWide = 8 / R;  // eight sums at once
  for (; d + kWide * kLanes <= dim; d += kWide * kLanes) gather<T, R, kWide>(shares, v, dim, d);
  for (; d + kLanes <= dim; d += kLanes) gather<T, R, 1>(shares, v, dim, d);
  const int rest = int(dim - d);
  if (rest == 0) return;
  for (int r = 0; r < R; ++r) {
    vec acc = mul(load_tail(shares[r].row->acc + d, rest), splat(shares[r].shrink));
    for (int j = shares[r].from; j < shares[r].to; ++j)
      acc = fma(splat(shares[r].weights[j]), last_values_at(v, dim, j, d, rest), acc);
    store_tail(shares[r].row->acc + d, acc, rest);
  }
}

inline void announce(const uint8_t* plane, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) prefetch(plane + i);
}

// One block, for rows that look at one kv head; `ahead` is the block read next, or the same.
template <typename T>
void attend_block(const AttentionArgs& a, Share* shares, int count, int64_t block, int64_t ahead,
                  int64_t head) {
  const int64_t dim = a.kv.head_dim, bytes = a.kv.plane_bytes();
  const T* k = reinterpret_cast<const T*>(a.kv.plane(block, 0, head));
  const T* v = reinterpret_cast<const T*>(a.kv.plane(block, 1, head));
  if (ahead != block) announce(a.kv.plane(ahead, 0, head), bytes);
  int r = 0;
  for (; r + kTogether <= count; r += kTogether) score<T, kTogether>(shares + r, k, dim);
  for (; r + 2 <= count; r += 2) score<T, 2>(shares + r, k, dim);
  for (; r < count; ++r) score<T, 1>(shares + r, k, dim);
  for (r = 0; r < count; ++r) weigh(shares[r], a.scale);
  if (ahead != block) announce(a.kv.plane(ahead, 1, head), bytes);
  for (r = 0; r < count;) {
    int same = 1;
    while (same < kTogether && r + same < count && shares[r + same].sees_as(shares[r])) ++same;
    if (same == kTogether) {
      gather_rows<T, kTogether>(shares + r, v, dim);
    } else if (same > 1) {
      same = 2;
      gather_rows<T, 2>(shares + r, v, dim);
    } else {
      gather_rows<T, 1>(shares + r, v, dim);
    }
    r += same;
  }
}

// Fold a later split into what the splits before it gathered.
inline void merge(RowState& into, const RowState& from, int64_t dim) {
  if (from.total == 0.0f) return;  // the row sees no key of this split
  if (into.total == 0.0f) {
    into.peak = from.peak;
    into.total = from.total;
    std::memcpy(into.acc, from.acc, size_t(dim) * sizeof(float));
    return;
  }
  const float peak = from.peak > into.peak ? from.peak : into.peak;
  const float old_share = exp1(into.peak - peak), new_share = exp1(from.peak - peak);
  into.peak = peak;
  into.total = into.total * old_share + from.total * new_share;
  for (int64_t d = 0; d < dim; ++d) into.acc[d] = into.acc[d] * old_share + from.acc[d] * new_share;
}

inline void begin_rows(const AttentionArgs& a, const Task& task, RowState* rows) {
  const int64_t dim = a.kv.head_dim, group = a.heads / a.kv.kv_heads;
  for (int64_t i = 0; i < task.count; ++i)
    for (int64_t g = task.group_from; g < task.group_to; ++g, ++rows) {
      const int64_t token = task.query + i;
      rows->q = a.q + token * a.q_stride + (task.head * group + g) * dim;
      rows->position = a.context_len[task.seq] - (a.q_start[task.seq + 1] - token);
      rows->first = a.window > 0 ? std::max<int64_t>(0, rows->position - a.window + 1) : 0;
      rows->clear(dim);
    }
}

inline void end_rows(const AttentionArgs& a, const Task& task, const RowState* rows) {
  const int64_t dim = a.kv.head_dim, group = a.heads / a.kv.kv_heads;
  for (int64_t i = 0; i < task.count; ++i)
    for (int64_t g = task.group_from; g < task.group_to; ++g, ++rows) {
      const int64_t column = (task.head * group + g) * dim;
#if defined(C2C_TILES)
      if (a.tiled_out) {
        float line[kHeadMax];
        for (int64_t d = 0; d < dim; ++d) line[d] = rows->acc[d] / rows->total;
        const tile_linear::TiledRow out(a.tiled_out, a.tokens, a.heads * dim, task.query + i);
        out.write(column, line, dim);
        continue;
      }
#endif
      float* out = a.out + (task.query + i) * a.heads * dim + column;
      for (int64_t d = 0; d < dim; ++d) out[d] = rows->acc[d] / rows->total;
    }
}

// One split of a task, from cleared rows.
template <typename T>
void attend_split(const AttentionArgs& a, const Task& task, RowState* rows, int64_t split) {
  const int64_t* table = a.block_table + task.seq * a.table_stride;
  int64_t first = rows[0].first, last = rows[0].position;
  for (int r = 1; r < task.rows(); ++r) {
    first = std::min(first, rows[r].first);
    last = std::max(last, rows[r].position);
  }
  const int64_t begin = std::max(first / kBlock, split * kSplit);
  const int64_t end = std::min(last / kBlock + 1, (split + 1) * kSplit);
#if defined(C2C_CHUNKS)
  if constexpr (std::is_same_v<T, bf16>) return chunks::attend(a, task, rows, begin, end);
#endif
  for (int64_t b = begin; b < end; ++b) {
    Share shares[kTaskRows];
    int count = 0;
    for (int r = 0; r < task.rows(); ++r) {
      const int64_t from = rows[r].first - b * kBlock, to = rows[r].position + 1 - b * kBlock;
      if (from >= kBlock || to <= 0) continue;
      shares[count].row = rows + r;
      shares[count].from = from < 0 ? 0 : int(from);
      shares[count++].to = to > kBlock ? kBlock : int(to);
    }
    attend_block<T>(a, shares, count, table[b], table[b + 1 < end ? b + 1 : b], task.head);
  }
}

template <typename T>
void attend(const AttentionArgs& a, const Task& task, RowState* rows) {
  begin_rows(a, task, rows);
  if (task.split_to - task.split_from == 1) return attend_split<T>(a, task, rows, task.split_from);
  RowState part[kTaskRows];
  for (int64_t split = task.split_from; split < task.split_to; ++split) {
    begin_rows(a, task, part);
    attend_split<T>(a, task, part, split);
    for (int r = 0; r < task.rows(); ++r) merge(rows[r], part[r], a.kv.head_dim);
  }
}

// Tasks of `rows` rows or fewer.
inline std::vector<Task> attention_tasks(const AttentionArgs& a, int64_t rows) {
  const int64_t group = a.heads / a.kv.kv_heads;
  const int64_t queries = std::max<int64_t>(1, rows / group);
  const int64_t heads = std::min<int64_t>(group, rows);
  std::vector<Task> tasks;
  for (int64_t s = 0; s < a.seqs; ++s)
    for (int64_t q = a.q_start[s]; q < a.q_start[s + 1]; q += queries) {
      const int64_t count = std::min<int64_t>(queries, a.q_start[s + 1] - q);
      const int64_t keys = a.context_len[s] - (a.q_start[s + 1] - q) + count;
      const int64_t splits = (keys + kSplit * kBlock - 1) / (kSplit * kBlock);
      for (int64_t h = 0; h < a.kv.kv_heads; ++h)
        for (int64_t g = 0; g < group; g += heads)
          tasks.push_back({s, q, count, h, g, std::min(g + heads, group), 0, splits});
    }
  return tasks;
}

// Few tasks over long contexts: the splits of each are shared out, then merged in order.
template <typename T>
void attention_by_splits(ThreadPool& pool, const AttentionArgs& a, const std::vector<Task>& tasks) {
  std::vector<Task> parts;
  for (Task task : tasks)
    for (int64_t split = 0; split < task.split_to; ++split) {
      parts.push_back(task);
      parts.back().split_from = split;
      parts.back().split_to = split + 1;
    }
  std::unique_ptr<RowState[]> states(new RowState[parts.size() * kTaskRows]);  // not cleared
  pool.each(int64_t(parts.size()), [&](int64_t i) {
    attend<T>(a, parts[size_t(i)], states.get() + i * kTaskRows);
  });
  const RowState* part = states.get();
  for (const Task& task : tasks) {
    RowState rows[kTaskRows];
    begin_rows(a, task, rows);
    for (int64_t split = 0; split < task.split_to; ++split, part += kTaskRows)
      for (int r = 0; r < task.rows(); ++r) merge(rows[r], part[r], a.kv.head_dim);
    end_rows(a, task, rows);
  }
}

// The first sequence whose rows or blocks are not all there, or -1.
inline int64_t misplaced_sequence(const AttentionArgs& a) {
  for (int64_t s = 0; s < a.seqs; ++s) {
    const int64_t fresh = a.q_start[s + 1] - a.q_start[s], known = a.context_len[s];
    const int64_t blocks = (known + kBlock - 1) / kBlock;
    if (a.q_start[s] < 0 || fresh < 0 || a.q_start[s + 1] > a.tokens) return s;
    if (known < fresh || blocks > a.table_stride) return s;
    for (int64_t b = 0; b < blocks; ++b)
      if (!a.kv.holds(a.block_table[s * a.table_stride + b])) return s;
  }
  return a.q_start[0] == 0 && a.q_start[a.seqs] == a.tokens ? -1 : 0;
}

// Rows that a task has. On tiles, more rows share the layout of keys and values. But every thread
// should have several tasks.
template <typename T>
int64_t task_rows([[maybe_unused]] const ThreadPool& pool,
                  [[maybe_unused]] const AttentionArgs& a) {
#if defined(C2C_TILES)
  if constexpr (std::is_same_v<T, bf16>) {
    const int64_t each = a.tokens * a.heads / (6 * pool.size()) / chunks::kWalk * chunks::kWalk;
    return std::clamp<int64_t>(each, chunks::kWalk, chunks::kPromptRows);
  }
#endif
  return kTaskRows;
}

template <typename T>
void attend_whole(const AttentionArgs& a, const Task& task) {
#if defined(C2C_TILES)
  if constexpr (std::is_same_v<T, bf16>)
    if (task.rows() > kTaskRows) return chunks::Prompt::of_thread().attend(a, task);
#endif
  RowState rows[kTaskRows];
  attend<T>(a, task, rows);
  end_rows(a, task, rows);
}

template <typename T>
void attention_typed(ThreadPool& pool, const AttentionArgs& a) {
  const std::vector<Task> tasks = attention_tasks(a, task_rows<T>(pool, a));
  int64_t work = 0, splits = 0;
  for (const Task& task : tasks) {
    work += task.rows() * a.context_len[task.seq] * a.kv.head_dim;
    splits = std::max(splits, task.split_to);
  }
  if (pool.size() > 1 && splits > 1 && int64_t(tasks.size()) < 2 * pool.size())
    return attention_by_splits<T>(pool, a, attention_tasks(a, kTaskRows));
  if (work < 50'000)
    for (const Task& task : tasks) attend_whole<T>(a, task);
  else
    pool.each(int64_t(tasks.size()), [&](int64_t i) {
      attend_whole<T>(a, tasks[tasks.size() - 1 - size_t(i)]);  // a prompt's end has the most keys
    });
}

// `a` has no misplaced sequence. `dtype`: the cache's.
inline void attention(ThreadPool& pool, Dtype dtype, const AttentionArgs& a) {
  switch (dtype) {
    case Dtype::f32: return attention_typed<float>(pool, a);
    case Dtype::f16: return attention_typed<f16>(pool, a);
    case Dtype::bf16: return attention_typed<bf16>(pool, a);
  }
}

}  // namespace c2c
