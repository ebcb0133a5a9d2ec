// The paged key-value cache. A block of the arena holds 16 tokens of all layers (block-first):
//
//   block      [layer][k | v][kv head][plane]        a plane is 16 x head_dim elements
//   k plane    [head_dim][16 tokens]                 transposed: a query's 16 scores come as whole
//   v plane    [16 tokens][head_dim]                 vectors, without a horizontal sum
//
// In bf16, two values that are multiplied one after the other lie side by side, as bf16 units read
// them. Float32 units take such a pair apart by one shift or one mask.
//
//   k plane    [head_dim / 2][16 tokens][2]          pairs of dimensions
//   v plane    [8][head_dim][2]                      pairs of tokens
#pragma once
#include "rowwise.h"
#include "simd.h"
#include "threads.h"

namespace c2c {

constexpr int kBlock = 16;
constexpr int kHeadMax = 512;

struct KvArgs {
  uint8_t* arena;
  int64_t arena_bytes;
  int64_t layers, kv_heads, head_dim, layer;
  int64_t item;  // bytes per element

  int64_t plane_bytes() const { return kBlock * head_dim * item; }
  int64_t block_bytes() const { return layers * 2 * kv_heads * plane_bytes(); }
  bool holds(int64_t block) const { return block >= 0 && block <= arena_bytes - block_bytes(); }
  uint8_t* plane(int64_t block, int64_t v, int64_t head) const {
    return arena + block + ((layer * 2 + v) * kv_heads + head) * plane_bytes();
  }
};

struct RopeStoreArgs {
  KvArgs kv;
  float* qkv;  // [T, (heads + 2 kv_heads) * head_dim], q and k rotated in place
  const int32_t* positions;
  const float *cos, *sin;  // [table, head_dim / 2]
  int64_t table;
  const float *q_norm, *k_norm;  // [head_dim] or null
  const int64_t* slots;          // [T] byte offset of the token's block * 16 + its place in it
  int64_t tokens, heads;
  float eps;
};

template <typename T>
void store_kv(const KvArgs& kv, int64_t slot, int64_t head, const float* k, const float* v) {
  T* ks = reinterpret_cast<T*>(kv.plane(slot / kBlock, 0, head)) + slot % kBlock;
  T* vs = reinterpret_cast<T*>(kv.plane(slot / kBlock, 1, head)) + slot % kBlock * kv.head_dim;
  for (int64_t d = 0; d < kv.head_dim; ++d) from_float(ks[d * kBlock], k[d]);
  narrow(vs, v, kv.head_dim);
}

template <>
inline void store_kv<bf16>(const KvArgs& kv, int64_t slot, int64_t head, const float* k,
                           const float* v) {
  const int64_t token = slot % kBlock, dim = kv.head_dim;
  bf16* ks = reinterpret_cast<bf16*>(kv.plane(slot / kBlock, 0, head)) + 2 * token;
  bf16* vs = reinterpret_cast<bf16*>(kv.plane(slot / kBlock, 1, head)) + token / 2 * 2 * dim;
  bf16 rounded[kHeadMax];
  narrow(rounded, k, dim);
  for (int64_t d = 0; d < dim; d += 2)
    std::memcpy(ks + d * kBlock, rounded + d, 2 * sizeof(bf16));
  narrow(rounded, v, dim);
  for (int64_t d = 0; d < dim; ++d) vs[2 * d + token % 2] = rounded[d];
}

template <typename T>
void rope_store_row(const RopeStoreArgs& a, int64_t t) {
  const int64_t dim = a.kv.head_dim;
  float* row = a.qkv + t * (a.heads + 2 * a.kv.kv_heads) * dim;
  const float* cos = a.cos + a.positions[t] * (dim / 2);
  const float* sin = a.sin + a.positions[t] * (dim / 2);
  for (int64_t h = 0; h < a.heads + a.kv.kv_heads; ++h) {
    const float* norm = h < a.heads ? a.q_norm : a.k_norm;
    if (norm) rms_norm_row(row + h * dim, row + h * dim, norm, a.eps, dim);
    rope_head(row + h * dim, cos, sin, dim / 2);
  }
  const float* k = row + a.heads * dim;
  for (int64_t h = 0; h < a.kv.kv_heads; ++h)
    store_kv<T>(a.kv, a.slots[t], h, k + h * dim, k + (a.kv.kv_heads + h) * dim);
}

// The first token whose position or slot lies outside of the tables or the arena, or -1.
inline int64_t misplaced_token(const RopeStoreArgs& a) {
  for (int64_t t = 0; t < a.tokens; ++t)
    if (a.positions[t] < 0 || a.positions[t] >= a.table || a.slots[t] < 0 ||
        !a.kv.holds(a.slots[t] / kBlock))
      return t;
  return -1;
}

template <typename T>
void rope_store_typed(ThreadPool& pool, const RopeStoreArgs& a) {
  // Keys go to lines that no cache has: each pair takes as long as many operations.
  const int64_t stored = a.kv.kv_heads * a.kv.head_dim, width = a.heads * a.kv.head_dim + 2 * stored;
  pool.rows(a.tokens, 2 * width + 24 * stored, [&](int64_t t) { rope_store_row<T>(a, t); });
}

// `a` has no misplaced token. `dtype`: the cache's.
inline void rope_store(ThreadPool& pool, Dtype dtype, const RopeStoreArgs& a) {
  switch (dtype) {
    case Dtype::f32: return rope_store_typed<float>(pool, a);
    case Dtype::f16: return rope_store_typed<f16>(pool, a);
    case Dtype::bf16: return rope_store_typed<bf16>(pool, a);
  }
}

}  // namespace c2c
