// Paged attention for ragged prefill, chunked prefill and decode alike.
//
// Every (query, head) row reads its blocks in order, with an online softmax of its own. Blocks are
// cut at absolute token positions into splits of kSplit blocks. Each split starts a new softmax,
// and splits are merged in order, by one thread or by several. Rows are only computed together to
// share loads. So a row's bits depend on that row alone.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <type_traits>
#include <vector>

#include "blocks.h"
#include "chunks.h"
#if defined(C2C_TILES)
#include "../tiles/prompt.h"
#endif

namespace c2c {

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
      rows->position = a.position(task.seq, token);
      rows->first = a.first_key(rows->position);
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

inline int64_t splits_until(const AttentionArgs& a, int64_t seq, int64_t token) {
  return (a.position(seq, token) + kSplit * kBlock - 1) / (kSplit * kBlock);
}

// Tasks of `rows` rows or fewer, of one kv head.
inline void take_rows(std::vector<Task>& tasks, const AttentionArgs& a, int64_t seq, int64_t head,
                      int64_t rows) {
  const int64_t group = a.heads / a.kv.kv_heads, end = a.q_start[seq + 1];
  const int64_t queries = std::max<int64_t>(1, rows / group);
  const int64_t heads = std::min<int64_t>(group, rows);
  for (int64_t q = a.q_start[seq]; q < end; q += queries) {
    const int64_t count = std::min<int64_t>(queries, end - q);
    for (int64_t g = 0; g < group; g += heads)
      tasks.push_back({seq, q, count, head, g, std::min(g + heads, group), 0,
                       splits_until(a, seq, q + count)});
  }
}

#if defined(C2C_TILES)
constexpr int64_t kTiledTokens = 48;  // of a sequence, from which on its tasks have whole tiles

// The same, of pairs of tiles of x: all tokens of them, and some heads or all.
inline void take_tiles(std::vector<Task>& tasks, const AttentionArgs& a, int64_t seq, int64_t head,
                       int64_t rows) {
  using chunks::kWalk;
  const int64_t group = a.heads / a.kv.kv_heads, end = a.q_start[seq + 1];
  const int64_t heads = std::clamp<int64_t>(rows / kWalk, 1, group);
  const int64_t parts = (group + heads - 1) / heads;
  const int64_t tokens = std::max<int64_t>(rows / (kWalk * group), 1) * kWalk;
  for (int64_t q = a.q_start[seq], next; q < end; q = next) {
    next = std::min(q / kWalk * kWalk + tokens, end);
    for (int64_t p = 0; p < parts; ++p)
      tasks.push_back({seq, q, next - q, head, group * p / parts, group * (p + 1) / parts, 0,
                       splits_until(a, seq, next), true});
  }
}
#endif

// All tasks, of a sequence's kv heads one after another.
inline std::vector<Task> attention_tasks(const AttentionArgs& a, int64_t rows) {
  std::vector<Task> tasks;
  for (int64_t s = 0; s < a.seqs; ++s)
    for (int64_t h = 0; h < a.kv.kv_heads; ++h) {
#if defined(C2C_TILES)
      if (rows > kTaskRows && a.q_start[s + 1] - a.q_start[s] >= kTiledTokens) {
        take_tiles(tasks, a, s, h, rows);
        continue;
      }
#endif
      take_rows(tasks, a, s, h, rows);
    }
  return tasks;
}

// Few tasks over long contexts: the splits of each are shared out. Who ends a task's last one merges
// them in order.
template <typename T>
void attention_by_splits(ThreadPool& pool, const AttentionArgs& a, const std::vector<Task>& tasks) {
  struct Part {
    Task task;
    size_t of;
  };
  std::vector<Part> parts;
  std::vector<std::atomic<int64_t>> left(tasks.size());
  for (size_t of = 0; of < tasks.size(); ++of) {
    left[of] = tasks[of].split_to;
    for (int64_t split = 0; split < tasks[of].split_to; ++split) {
      parts.push_back({tasks[of], of});
      parts.back().task.split_from = split;
      parts.back().task.split_to = split + 1;
    }
  }
  std::unique_ptr<RowState[]> states(new RowState[parts.size() * kTaskRows]);  // not cleared
  pool.each(int64_t(parts.size()), [&](int64_t i) {
    const auto& [part, of] = parts[size_t(i)];
    attend<T>(a, part, states.get() + i * kTaskRows);
    if (left[of].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    RowState rows[kTaskRows];
    begin_rows(a, tasks[of], rows);
    const RowState* from = states.get() + (i - part.split_from) * kTaskRows;
    for (int64_t split = 0; split < tasks[of].split_to; ++split, from += kTaskRows)
      for (int r = 0; r < part.rows(); ++r) merge(rows[r], from[r], a.kv.head_dim);
    end_rows(a, tasks[of], rows);
  });
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

#if defined(C2C_CHUNKS)
template <typename T>
constexpr bool kInChunks = std::is_same_v<T, bf16>;
#else
template <typename T>
constexpr bool kInChunks = false;
#endif

// Rows that a task has. On tiles a prompt's share the loads of keys and values. But every thread
// should have several tasks.
template <typename T>
int64_t task_rows([[maybe_unused]] const ThreadPool& pool,
                  [[maybe_unused]] const AttentionArgs& a) {
#if defined(C2C_TILES)
  if constexpr (kInChunks<T>) {
    const int64_t each = a.tokens * a.heads / (6 * pool.size()) / chunks::kWalk * chunks::kWalk;
    return std::clamp<int64_t>(each, chunks::kWalk, chunks::kPromptRows);
  }
#endif
  return kTaskRows;
}

// Multiplications of a task, as its units count them: a chunk takes as long with fewer rows or keys.
template <typename T>
int64_t work_of(const AttentionArgs& a, const Task& task) {
  int64_t rows = task.rows(), keys = a.context_len[task.seq];
  if constexpr (kInChunks<T>) {
    rows = (rows + chunks::kRows - 1) / chunks::kRows * chunks::kRows;
    keys = (keys + chunks::kKeys - 1) / chunks::kKeys * chunks::kKeys;
  }
  return rows * keys * a.kv.head_dim;
}

template <typename T>
void attend_few(const AttentionArgs& a, const Task& task) {
  RowState rows[kTaskRows];
  attend<T>(a, task, rows);
  end_rows(a, task, rows);
}

#if defined(C2C_TILES)
constexpr int64_t kLaidOut = 32 << 20;  // bytes of keys and values at once, if there are several heads

// All tasks, prompts once their keys and values are laid out. Later tasks come first: a prompt's end has the
// most keys. `each(count, body)` calls body(i) for all.
template <typename Each>
void attend_laid_out(ThreadPool& pool, const AttentionArgs& a, const std::vector<Task>& tasks,
                     const Each& each) {
  using chunks::Layout;
  for (size_t begin = 0, end = 0; begin < tasks.size(); begin = end) {
    std::vector<Layout> layouts;
    std::vector<size_t> of;  // of a task: the layout it reads, counted from one
    int64_t values = 0, laid_out = 0;
    for (; end < tasks.size(); ++end) {
      const Task& task = tasks[end];
      if (task.rows() > kTaskRows && (layouts.empty() || !layouts.back().of(task))) {
        const Layout next(a, task.seq, task.head);
        if (values > 0 && (values + next.size()) * int64_t(sizeof(bf16)) > kLaidOut) break;
        layouts.push_back(next);
        values += next.size();
        laid_out += next.chunks();
      }
      of.push_back(task.rows() > kTaskRows ? layouts.size() : 0);
    }
    auto* data = reinterpret_cast<bf16*>(pool.between(values / 2));
    std::vector<std::pair<const Layout*, int64_t>> pieces;
    pieces.reserve(size_t(laid_out));
    for (Layout& layout : layouts) {
      layout.lie_at(data);
      data += layout.size();
      for (int64_t i = 0; i < layout.chunks(); ++i) pieces.emplace_back(&layout, i);
    }
    if (!pieces.empty())
      each(laid_out, [&](int64_t i) { pieces[size_t(i)].first->take(a, pieces[size_t(i)].second); });
    each(int64_t(of.size()), [&](int64_t i) {
      const size_t at = of.size() - 1 - size_t(i);
      if (of[at] > 0)
        chunks::Prompt::of_thread().attend(a, tasks[begin + at], layouts[of[at] - 1]);
      else
        attend_few<bf16>(a, tasks[begin + at]);
    });
  }
}
#endif

template <typename T>
void attention_typed(ThreadPool& pool, const AttentionArgs& a) {
  const std::vector<Task> tasks = attention_tasks(a, task_rows<T>(pool, a));
  int64_t work = 0, splits = 0;
  for (const Task& task : tasks) {
    work += work_of<T>(a, task);
    splits = std::max(splits, task.split_to);
  }
  if (pool.size() > 1 && splits > 1 && int64_t(tasks.size()) < 2 * pool.size())
    return attention_by_splits<T>(pool, a, attention_tasks(a, kTaskRows));
  const auto each = [&](int64_t count, const auto& body) {
    constexpr int64_t kWorthHelpers = kInChunks<T> ? 200'000 : 50'000;
    if (work >= kWorthHelpers) return pool.each(count, body);
    for (int64_t i = 0; i < count; ++i) body(i);
  };
#if defined(C2C_TILES)
  if constexpr (kInChunks<T>) return attend_laid_out(pool, a, tasks, each);
#endif
  each(int64_t(tasks.size()), [&](int64_t i) { attend_few<T>(a, tasks[tasks.size() - 1 - size_t(i)]); });
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
