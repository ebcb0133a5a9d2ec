// Attention over a cache in bf16 on bf16 units: 64 keys at a time, cut at absolute positions.
//
//   scores    [rows][64] = q k^T     q is rounded to bf16; sums are float32
//   weights   exp(scores - peak)     rounded to bf16; their total is that of the unrounded ones
//   acc       acc * shrink + weights v
//
// A chunk costs one peak, one total and one rescaling per row. Which rows go through it together
// decides nothing: products are sums over dimensions, or over keys, in order, and keys that a row
// does not see weigh zero. Keys that no row of the task sees count as zeros, whatever lies there.
#pragma once
#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>

#include "attention_args.h"
#include "dot.h"
#include "tiles/registers.h"

#if defined(__AVX512BF16__) || defined(C2C_TILES)
#define C2C_CHUNKS 1
namespace c2c::chunks {

constexpr int kBlocks = 4;
constexpr int kKeys = kBlocks * kBlock;
constexpr int kRows = 16;   // that go through a chunk together
constexpr int kWidth = 32;  // q is padded with zeros to a multiple of it

// A chunk as a task's rows see it.
struct Chunk {
  int64_t first;  // key
  int from, to;   // keys of it that some row sees
  int64_t dim;
  const bf16 *k[kBlocks], *v[kBlocks];  // planes [dim][16] and [16][dim] of the blocks it holds

  bool holds(int block) const { return (block + 1) * kBlock > from && block * kBlock < to; }
  // A key's values, or null if no row sees it.
  const bf16* values(int key) const {
    return key >= from && key < to ? v[key / kBlock] + key % kBlock * dim : nullptr;
  }
};

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

#if defined(__AVX512F__)
// [a0 b0 a1 b1 ...] of two rows of 16; a row that is null counts as zeros.
inline __m512i interleaved(const bf16* a, const bf16* b, __mmask16 lanes) {
  alignas(64) static constexpr uint16_t kOrder[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m256i low = _mm256_maskz_loadu_epi16(a ? lanes : 0, a);
  const __m256i high = _mm256_maskz_loadu_epi16(b ? lanes : 0, b);
  const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), both);
}
#endif

}  // namespace c2c::chunks

#if defined(C2C_TILES)
#include "tiles/chunks.h"
#else
#include "chunk_dots.h"
#endif

namespace c2c::chunks {

// What a thread works in, kept from call to call.
struct alignas(64) Buffers {
  bf16 q[kTaskRows * kHeadMax];
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
  vec part[kParts], best = splat(row.peak);
  for (int p = 0; p < kParts; ++p) {
    const vec scaled = mul(load(scores + p * kLanes), splat(scale));
    part[p] = chosen(visible >> p * kLanes, scaled, hidden);
    best = max(best, part[p]);
  }
  const float peak = largest(best);
  vec total = zero();
  for (int p = 0; p < kParts; ++p) {
    part[p] = chosen(visible >> p * kLanes, exp(sub(part[p], splat(peak))), zero());
    total = add(total, part[p]);
  }
  for (int p = 0; p < kParts; p += 2) round_pair(weights + p * kLanes, part[p], part[p + 1]);
  float shrink = 0.0f;
  if (row.total != 0.0f) shrink = row.peak == peak ? 1.0f : exp1(row.peak - peak);
  row.total = row.total * shrink + sum(total);
  row.peak = peak;
  return shrink;
}

// Rows of q in bf16, zeros behind each and behind the last one, up to whole groups of 16.
inline int64_t round_queries(const Task& task, const RowState* rows, int64_t dim, bf16* out) {
  const int64_t width = (dim + kWidth - 1) / kWidth * kWidth;
  const int64_t all = (task.rows() + kRows - 1) / kRows * kRows;
  for (int64_t r = 0; r < all; ++r, out += width) {
    std::memset(out, 0, size_t(width) * sizeof(bf16));
    if (r < task.rows()) narrow(out, rows[r].q, dim);
  }
  return width;
}

// The blocks [begin, end) of one chunk, as far as rows see them.
inline Chunk chunk_of(const AttentionArgs& a, const Task& task, const RowState* rows,
                      int64_t begin, int64_t end) {
  const int64_t* table = a.block_table + task.seq * a.table_stride;
  Chunk chunk{begin / kBlocks * kKeys, kKeys, 0, a.kv.head_dim, {}, {}};
  for (int r = 0; r < task.rows(); ++r) {
    chunk.from = int(std::clamp<int64_t>(rows[r].first - chunk.first, 0, chunk.from));
    chunk.to = int(std::clamp<int64_t>(rows[r].position + 1 - chunk.first, chunk.to, kKeys));
  }
  for (int64_t b = begin; b < end; ++b) {
    chunk.k[b % kBlocks] = reinterpret_cast<const bf16*>(a.kv.plane(table[b], 0, task.head));
    chunk.v[b % kBlocks] = reinterpret_cast<const bf16*>(a.kv.plane(table[b], 1, task.head));
  }
  return chunk;
}

// The blocks that are read next.
inline void announce(const AttentionArgs& a, const Task& task, int64_t begin, int64_t end) {
  const int64_t* table = a.block_table + task.seq * a.table_stride;
  for (int64_t b = begin; b < end; ++b)
    for (int64_t i = 0; i < a.kv.plane_bytes(); i += 64) {
      prefetch(a.kv.plane(table[b], 0, task.head) + i);
      prefetch(a.kv.plane(table[b], 1, task.head) + i);
    }
}

// Blocks [begin, end): all that the rows see of a split.
inline void attend(const AttentionArgs& a, const Task& task, RowState* rows, int64_t begin,
                   int64_t end) {
  Buffers& buffers = Buffers::of_thread();
  const int64_t width = round_queries(task, rows, a.kv.head_dim, buffers.q);
  [[maybe_unused]] const Units::Session session;
  for (int64_t b = begin; b < end;) {
    const int64_t next = std::min((b / kBlocks + 1) * kBlocks, end);
    const Chunk chunk = chunk_of(a, task, rows, b, next);
    announce(a, task, next, std::min(next + kBlocks, end));
    buffers.units.take(chunk);
    for (int r = 0; r < task.rows(); r += kRows) {
      Rows some{rows + r, std::min(kRows, task.rows() - r), buffers.q + r * width, width,
                buffers.scores, buffers.weights, {}};
      buffers.units.score(chunk, some);
      for (int i = 0; i < some.count; ++i)
        some.shrink[i] = weigh(some.rows[i], some.scores + i * kKeys,
                               seen(some.rows[i], chunk.first), a.scale, some.weights + i * kKeys);
      buffers.units.gather(chunk, some);
    }
    b = next;
  }
}

}  // namespace c2c::chunks
#endif
