// The C interface: one shared library per instruction set, the same functions in each. (One library
// with several translation units would let the linker merge the standard library's templates
// across instruction sets, and run AVX-512 code on a machine without it.)
#include "attention.h"
#include "linear.h"
#include "moe.h"
#include "rowwise.h"
#include "sample.h"

using namespace c2c;

namespace {

// Rows of an operator that costs `per_row` operations each, over the pool's threads.
template <typename Body>
void over_rows(ThreadPool& pool, int64_t rows, int64_t per_row, const Body& body) {
  int parts = rows * per_row < 30'000 ? 1 : pool.size();
  pool.run(parts, [&](int part, int all) {
    for (int64_t i = rows * part / all; i < rows * (part + 1) / all; ++i) body(i);
  });
}

template <typename From, typename To>
void convert_typed(void* to, const void* from, int64_t n) {
  // The source may lie at any byte of a file.
  const auto* in = static_cast<const uint8_t*>(from);
  auto* out = static_cast<To*>(to);
  for (int64_t i = 0; i < n; ++i) {
    From value;
    std::memcpy(&value, in + i * int64_t(sizeof(From)), sizeof(From));
    from_float(out[i], to_float(value));
  }
}

template <typename From>
void convert_from(void* to, Dtype to_type, const void* from, int64_t n) {
  switch (to_type) {
    case Dtype::f32: return convert_typed<From, float>(to, from, n);
    case Dtype::f16: return convert_typed<From, f16>(to, from, n);
    case Dtype::bf16: return convert_typed<From, bf16>(to, from, n);
  }
}

}  // namespace

extern "C" {

void* c2c_pool_new(int threads, const int* cpus, int cpu_count) {
  return new ThreadPool(threads, cpus, cpu_count);
}

void c2c_pool_free(void* pool) { delete static_cast<ThreadPool*>(pool); }

void c2c_embed(float* out, const void* table, int dtype, const int32_t* ids, int64_t tokens, int64_t hidden) {
  for (int64_t t = 0; t < tokens; ++t) widen_row(out + t * hidden, table, Dtype(dtype), ids[t], hidden);
}

void c2c_linear(void* pool, float* out, int64_t out_stride, const float* x, int64_t x_stride, const void* w,
                int64_t w_stride, int dtype, const float* bias, int64_t m, int64_t n, int64_t k) {
  linear(*static_cast<ThreadPool*>(pool), {out, out_stride, x, x_stride, w, w_stride, bias, m, n, k}, Dtype(dtype));
}

void c2c_rms_norm(void* pool, float* out, const float* x, const float* weight, float eps, int64_t tokens, int64_t hidden) {
  over_rows(*static_cast<ThreadPool*>(pool), tokens, hidden, [=](int64_t t) {
    rms_norm_row(out + t * hidden, x + t * hidden, weight, eps, hidden);
  });
}

// residual += x, then out = norm(residual)
void c2c_add_rms_norm(void* pool, float* out, const float* x, float* residual, const float* weight, float eps,
                      int64_t tokens, int64_t hidden) {
  over_rows(*static_cast<ThreadPool*>(pool), tokens, 2 * hidden, [=](int64_t t) {
    add_row(residual + t * hidden, x + t * hidden, hidden);
    rms_norm_row(out + t * hidden, residual + t * hidden, weight, eps, hidden);
  });
}

void c2c_silu_mul(void* pool, float* out, const float* gate_up, int64_t tokens, int64_t inner) {
  over_rows(*static_cast<ThreadPool*>(pool), tokens, 8 * inner, [=](int64_t t) {
    const float* row = gate_up + t * 2 * inner;
    silu_mul_row(out + t * inner, row, row + inner, inner);
  });
}

void c2c_rope_store(void* pool, float* qkv, const int32_t* positions, const float* cos, const float* sin,
                    const float* q_norm, const float* k_norm, float eps, void* arena, int dtype, int64_t layer,
                    const int64_t* slots, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim) {
  KvArgs kv{static_cast<uint8_t*>(arena), kv_heads, head_dim, layer, Dtype(dtype) == Dtype::f32 ? 4 : 2};
  RopeStoreArgs a{kv, qkv, positions, cos, sin, q_norm, k_norm, slots, tokens, heads, eps};
  ThreadPool& p = *static_cast<ThreadPool*>(pool);
  switch (Dtype(dtype)) {
    case Dtype::f32: return rope_store_typed<float>(p, a);
    case Dtype::f16: return rope_store_typed<f16>(p, a);
    case Dtype::bf16: return rope_store_typed<bf16>(p, a);
  }
}

void c2c_attention(void* pool, float* out, const float* q, int64_t q_stride, void* arena, int dtype, int64_t layer,
                   const int32_t* q_start, const int32_t* context_len, const int64_t* block_table,
                   int64_t table_stride, int64_t seqs, int64_t heads, int64_t kv_heads, int64_t head_dim, float scale,
                   int64_t window) {
  KvArgs kv{static_cast<uint8_t*>(arena), kv_heads, head_dim, layer, Dtype(dtype) == Dtype::f32 ? 4 : 2};
  AttentionArgs a{kv, q, q_stride, out, q_start, context_len, block_table, table_stride, seqs, heads, scale, window};
  ThreadPool& p = *static_cast<ThreadPool*>(pool);
  switch (Dtype(dtype)) {
    case Dtype::f32: return attention_typed<float>(p, a);
    case Dtype::f16: return attention_typed<f16>(p, a);
    case Dtype::bf16: return attention_typed<bf16>(p, a);
  }
}

void c2c_moe_route(const float* logits, int64_t tokens, int64_t experts, int64_t k, int renormalize, int32_t* ids,
                   float* weights) {
  for (int64_t t = 0; t < tokens; ++t)
    route_row(logits + t * experts, experts, k, renormalize != 0, ids + t * k, weights + t * k);
}

void c2c_moe_experts(void* pool, float* out, const float* x, const int32_t* ids, const float* weights, const void* w13,
                     const void* w2, int dtype, int64_t tokens, int64_t k, int64_t experts, int64_t hidden,
                     int64_t inner) {
  int64_t item = Dtype(dtype) == Dtype::f32 ? 4 : 2;
  moe_experts(*static_cast<ThreadPool*>(pool), {out, x, ids, weights, w13, w2, tokens, k, experts, hidden, inner, item},
              Dtype(dtype));
}

void c2c_sample(void* pool, const SampleRow* rows, int64_t count, int64_t vocab, int32_t* ids, float* logprobs,
                int32_t* top_ids, float* top_logprobs, int64_t top_stride) {
  over_rows(*static_cast<ThreadPool*>(pool), count, vocab, [=](int64_t i) {
    sample_row(rows[i], vocab, {ids + i, logprobs + i, top_ids + i * top_stride, top_logprobs + i * top_stride});
  });
}

void c2c_convert(void* to, int to_type, const void* from, int from_type, int64_t n) {
  if (to_type == from_type) {
    std::memcpy(to, from, size_t(n) * (Dtype(to_type) == Dtype::f32 ? 4 : 2));
    return;
  }
  switch (Dtype(from_type)) {
    case Dtype::f32: return convert_from<float>(to, Dtype(to_type), from, n);
    case Dtype::f16: return convert_from<f16>(to, Dtype(to_type), from, n);
    case Dtype::bf16: return convert_from<bf16>(to, Dtype(to_type), from, n);
  }
}

// Read `n` floats' worth of bytes as fast as the cores can: the ceiling benchmarks compare with.
float c2c_read_bandwidth(void* pool, const float* data, int64_t n) {
  std::vector<float> sums(256);
  static_cast<ThreadPool*>(pool)->run(static_cast<ThreadPool*>(pool)->size(), [&](int part, int all) {
    vec acc[8];
    for (auto& a : acc) a = zero();
    int64_t begin = n * part / all / 128 * 128, end = n * (part + 1) / all / 128 * 128;
    for (int64_t i = begin; i < end; i += 8 * kLanes)
      for (int j = 0; j < 8; ++j) {
        acc[j] = add(acc[j], load(data + i + j * kLanes));
        __builtin_prefetch(reinterpret_cast<const char*>(data + i + j * kLanes) + 1024);
      }
    for (auto& a : acc) sums[size_t(part)] += sum(a);
  });
  return sums[0];
}
}
