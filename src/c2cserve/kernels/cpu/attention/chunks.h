// Attention over a cache in bf16 on bf16 units: 64 keys at a time, cut at absolute positions.
//
//   scores    [rows][64] = q k^T     q is rounded to bf16; sums are float32
//   weights   2^(scores - peak)      rounded to bf16; their total is that of the rounded ones
//   acc       acc * shrink + weights v
//
// A chunk costs one peak and one total per row. Which rows go through it together
// decides nothing: products are sums over dimensions, or over keys, in order, and keys that a row
// does not see weigh zero. Keys that no row of the task sees count as zeros, whatever lies there.
#pragma once
#include "chunk_rules.h"
#include "../tiles/registers.h"

#if defined(__AVX512BF16__) || defined(C2C_TILES)
#define C2C_CHUNKS 1
namespace c2c::chunks {

// A chunk as a task's rows see it.
struct Chunk {
  int64_t first;  // key
  int from, to;   // keys of it that some row sees
  int64_t dim;
  const bf16 *k[kBlocks], *v[kBlocks];  // planes of the blocks it holds
  // How far the next chunk's planes lie from these, in elements: they are announced on the way.
  int64_t next[kBlocks];

  bool holds(int block) const { return (block + 1) * kBlock > from && block * kBlock < to; }
  // Values of a key and the next one, in pairs, and which of each pair some row sees. `key` is even.
  const bf16* values(int key) const { return v[key / kBlock] + key % kBlock * dim; }
  uint32_t seen(int key) const { return pairs_seen(key, from, to); }
};

static_assert(kTaskRows <= kRows, "a task's rows go through a chunk together");

// Up to 16 rows in a chunk.
struct Rows {
  RowState* rows;
  int count;
  const bf16* q;  // [count][width], room for 16
  int64_t width;
  float* scores;        // [16][64]
  bf16* weights;        // [16][64]
  float shrink[kRows];  // of what a row has gathered so far
};

inline vec chosen(uint64_t bits, vec yes, vec no) {
#if defined(__AVX512F__)
  return {_mm512_mask_blend_ps(__mmask16(bits), no.v, yes.v)};
#else
  float lanes[kLanes], others[kLanes];
  store(lanes, yes);
  store(others, no);
  for (int l = 0; l < kLanes; ++l)
    if (!(bits >> l & 1)) lanes[l] = others[l];
  return load(lanes);
#endif
}

}  // namespace c2c::chunks

#if defined(C2C_TILES)
#include "../tiles/chunks.h"
#else
#include "chunk_dots.h"
#endif

namespace c2c::chunks {

// What a thread works in, kept from call to call.
struct alignas(64) Buffers {
  bf16 q[kRows * kHeadMax];
  float scores[kRows * kKeys];
  bf16 weights[kRows * kKeys];
  Units units;

  static Buffers& of_thread() {
    thread_local std::unique_ptr<Buffers> buffers(new Buffers());
    return *buffers;
  }
};

// Bits of the keys of a chunk that a row sees.
inline uint64_t seen(const RowState& row, int64_t first) {
  const int64_t from = std::clamp<int64_t>(row.first - first, 0, kKeys);
  const int64_t to = std::clamp<int64_t>(row.position + 1 - first, 0, kKeys);
  if (from >= to) return 0;
  const uint64_t below = to == kKeys ? ~uint64_t(0) : (uint64_t(1) << to) - 1;
  return below & ~((uint64_t(1) << from) - 1);
}

// A row's scores to weights. Returns by how much what it has gathered so far shrinks.
inline float weigh(RowState& row, const float* scores, uint64_t visible, float scale,
                   bf16* weights) {
  constexpr int kParts = kKeys / kLanes;
  if (!visible) {
    std::memset(weights, 0, sizeof(bf16) * kKeys);
    return 1.0f;
  }
  const vec hidden = splat(-std::numeric_limits<float>::infinity());
  vec part[kParts];
  for (int p = 0; p < kParts; ++p) part[p] = load(scores + p * kLanes);
  if (~visible)
    for (int p = 0; p < kParts; ++p) part[p] = chosen(visible >> p * kLanes, part[p], hidden);
  vec best = part[0];
  for (int p = 1; p < kParts; ++p) best = max(best, part[p]);
  const float found = largest(best) * scale;
  float shrink = 1.0f;
  if (found > row.peak + kSlack) {
    shrink = power_of_two1(row.peak - found);
    row.peak = found;
  }
  const vec base = sub(zero(), splat(row.peak));
  for (int p = 0; p < kParts; ++p) part[p] = power_of_two(fma(part[p], splat(scale), base));
  for (int p = 0; p < kParts; p += 2) round_pair(weights + p * kLanes, part[p], part[p + 1]);
  if constexpr (!Units::kAddTotals) {
    vec total = zero();
    for (int p = 0; p < kParts; ++p) total = add(total, load(weights + p * kLanes));
    row.total = row.total * shrink + sum(total);
  }
  return shrink;
}

// Rows of q in bf16, zeros behind each and behind the last one, up to 16.
inline int64_t round_queries(const Task& task, const RowState* rows, int64_t dim, bf16* out) {
  const int64_t width = (dim + kWidth - 1) / kWidth * kWidth;
  for (int64_t r = 0; r < kRows; ++r, out += width) {
    std::memset(out, 0, size_t(width) * sizeof(bf16));
    if (r < task.rows()) narrow(out, rows[r].q, dim);
  }
  return width;
}

// The blocks [begin, end) of one chunk, as far as rows see them; `last`: where their blocks end.
inline Chunk chunk_of(const AttentionArgs& a, const Task& task, const RowState* rows,
                      int64_t begin, int64_t end, int64_t last) {
  const int64_t* table = a.block_table + task.seq * a.table_stride;
  Chunk chunk{begin / kBlocks * kKeys, kKeys, 0, a.kv.head_dim, {}, {}, {}};
  for (int r = 0; r < task.rows(); ++r) {
    chunk.from = int(std::clamp<int64_t>(rows[r].first - chunk.first, 0, chunk.from));
    chunk.to = int(std::clamp<int64_t>(rows[r].position + 1 - chunk.first, chunk.to, kKeys));
  }
  for (int64_t b = begin; b < end; ++b) {
    const int64_t at = b % kBlocks, next = b + kBlocks < last ? b + kBlocks : b;
    chunk.k[at] = reinterpret_cast<const bf16*>(a.kv.plane(table[b], 0, task.head));
    chunk.v[at] = reinterpret_cast<const bf16*>(a.kv.plane(table[b], 1, task.head));
    chunk.next[at] = (table[next] - table[b]) / int64_t(sizeof(bf16));
  }
  return chunk;
}

// Blocks [begin, end): all that the rows see of a split. Peaks are powers of two meanwhile.
inline void attend(const AttentionArgs& a, const Task& task, RowState* rows, int64_t begin,
                   int64_t end) {
  Buffers& buffers = Buffers::of_thread();
  const int64_t width = round_queries(task, rows, a.kv.head_dim, buffers.q);
  const float scale = a.scale * kLog2e;
  [[maybe_unused]] const Units::Session session(kRows, task.rows());
  for (int64_t b = begin; b < end;) {
    const int64_t next = std::min((b / kBlocks + 1) * kBlocks, end);
    const Chunk chunk = chunk_of(a, task, rows, b, next, end);
    buffers.units.take(chunk);
    Rows some{rows, task.rows(), buffers.q, width, buffers.scores, buffers.weights, {}};
    buffers.units.score(chunk, some);
    for (int i = 0; i < some.count; ++i)
      some.shrink[i] = weigh(rows[i], some.scores + i * kKeys, seen(rows[i], chunk.first), scale,
                             some.weights + i * kKeys);
    buffers.units.gather(chunk, some);
    b = next;
  }
  for (int i = 0; i < task.rows(); ++i) {
    rows[i].peak *= kLn2;
    if constexpr (Units::kAddTotals) rows[i].total = rows[i].acc[RowState::padded(a.kv.head_dim)];
  }
}

}  // namespace c2c::chunks
#endif
