// The C interface: one shared library per instruction set, the same functions in each. (In a common
// library, the linker would merge the standard library's templates across instruction sets. Then
// AVX-512 code could run on a machine without it. All else is hidden: if several
// libraries are in one process, the loader would merge their thread-local buffers.)
//
// Functions that take indices return -1, or the place of the first index that is out of bounds. In
// that case they have written nothing.
#include "attention/attention.h"
#include "convert.h"
#include "crc32.h"
#include "decoder.h"
#include "kv.h"
#include "linear.h"
#include "moe.h"
#include "rows.h"
#include "sample.h"
#include "tiles/ceiling.h"

using namespace c2c;

namespace {

ThreadPool& pool_of(void* pool) { return *static_cast<ThreadPool*>(pool); }

KvArgs kv_of(void* arena, int64_t bytes, Dtype dtype, int64_t layers, int64_t kv_heads,
             int64_t head_dim, int64_t layer) {
  return {static_cast<uint8_t*>(arena), bytes, layers, kv_heads, head_dim, layer,
          dtype == Dtype::f32 ? 4 : 2};
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void* c2c_pool_new(int threads, const int* cpus, int cpu_count) {
  return new ThreadPool(threads, cpus, cpu_count);
}

void c2c_pool_free(void* pool) { delete static_cast<ThreadPool*>(pool); }

// Records the next `calls` calls that are shared out, until `c2c_trace_end` copies them.
void c2c_trace_begin(void* pool, int64_t calls) {
  pool_of(pool).trace.reset(new Trace(pool_of(pool).size(), calls));
}
int64_t c2c_trace_count(void* pool) { return pool_of(pool).trace->count(); }
void c2c_trace_end(void* pool, int64_t* out) {
  pool_of(pool).trace->copy(out);
  pool_of(pool).trace.reset();
}

int64_t c2c_embed(void* pool, float* out, const void* table, int dtype, int64_t vocab,
                  const int32_t* ids, int64_t tokens, int64_t hidden) {
  return embed(pool_of(pool), out, table, Dtype(dtype), vocab, ids, tokens, hidden);
}

void c2c_linear(void* pool, float* out, int64_t out_stride, const float* x, int64_t x_stride,
                const void* w, int64_t w_stride, int dtype, const void* bias, int bias_dtype,
                int64_t m, int64_t n, int64_t k) {
  linear(pool_of(pool),
         {out, out_stride, x, x_stride, w, w_stride, bias, Dtype(bias_dtype), m, n, k},
         Dtype(dtype));
}

// Logits [m, n] of a router: x [m, k] dense, w [n, k] dense.
void c2c_router_logits(void* pool, float* out, const float* x, const void* w, int dtype, int64_t m,
                       int64_t n, int64_t k) {
  linear_exact(pool_of(pool), {out, n, x, k, w, k, nullptr, Dtype::f32, m, n, k}, Dtype(dtype));
}

// out [m, n], x [m, k] and w [2 n, k] dense.
void c2c_gated(void* pool, float* out, const float* x, const void* w, int dtype, const void* bias,
               int bias_dtype, int64_t m, int64_t n, int64_t k) {
  linear(pool_of(pool), {out, n, x, k, w, k, bias, Dtype(bias_dtype), m, n, k, true},
         Dtype(dtype));
}

#if defined(C2C_TILES)
void c2c_copy_strips(void* pool, int always) { pool_of(pool).copies_strips = always != 0; }

double c2c_tile_steps(void* pool, int64_t w_bytes, int64_t x_bytes, int64_t steps) {
  return tile_steps(pool_of(pool), w_bytes, x_bytes, steps);
}
#endif

void c2c_rms_norm(void* pool, float* out, const float* x, const float* weight, float eps,
                  int64_t tokens, int64_t hidden) {
  rms_norm(pool_of(pool), out, x, weight, eps, tokens, hidden);
}

void c2c_add_rms_norm(void* pool, float* out, const float* x, float* residual, const float* weight,
                      float eps, int64_t tokens, int64_t hidden) {
  add_rms_norm(pool_of(pool), out, x, residual, weight, eps, tokens, hidden);
}

void c2c_silu_mul(void* pool, float* out, const float* gate_up, int64_t tokens, int64_t inner) {
  silu_mul(pool_of(pool), out, gate_up, tokens, inner);
}

int64_t c2c_rope_store(void* pool, float* qkv, const int32_t* positions, const float* cos,
                       const float* sin, int64_t table, const float* q_norm, const float* k_norm,
                       float eps, void* arena, int64_t arena_bytes, int dtype, int64_t layers,
                       int64_t layer, const int64_t* slots, int64_t tokens, int64_t heads,
                       int64_t kv_heads, int64_t head_dim) {
  const KvArgs kv = kv_of(arena, arena_bytes, Dtype(dtype), layers, kv_heads, head_dim, layer);
  const RopeStoreArgs a{kv,     qkv,    positions, cos,    sin,   table,
                        q_norm, k_norm, slots,     tokens, heads, eps};
  if (const int64_t bad = misplaced_token(a); bad >= 0) return bad;
  rope_store(pool_of(pool), Dtype(dtype), a);
  return -1;
}

int64_t c2c_attention(void* pool, float* out, const float* q, int64_t q_stride, void* arena,
                      int64_t arena_bytes, int dtype, int64_t layers, int64_t layer,
                      const int32_t* q_start, const int32_t* context_len,
                      const int64_t* block_table, int64_t table_stride, int64_t seqs,
                      int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim,
                      float scale, int64_t window) {
  const KvArgs kv = kv_of(arena, arena_bytes, Dtype(dtype), layers, kv_heads, head_dim, layer);
  const AttentionArgs a{kv,          q,    q_stride, out,   q_start, context_len, block_table,
                        table_stride, seqs, tokens,   heads, scale,   window};
  if (const int64_t bad = misplaced_sequence(a); bad >= 0) return bad;
  attention(pool_of(pool), Dtype(dtype), a);
  return -1;
}

void c2c_moe_route(void* pool, const float* logits, int64_t tokens, int64_t experts, int64_t k,
                   int renormalize, int32_t* ids, float* weights) {
  route(pool_of(pool), {logits, tokens, experts, k, renormalize != 0, ids, weights});
}

int64_t c2c_moe_experts(void* pool, float* out, const float* x, const int32_t* ids,
                        const float* weights, const void* w13, const void* w2, int dtype,
                        int64_t tokens, int64_t k, int64_t experts, int64_t hidden,
                        int64_t inner) {
  return moe_experts(pool_of(pool), {out, x, ids, weights, w13, w2, Dtype(dtype), tokens, k,
                                     experts, hidden, inner});
}

// Returns a Fault; `where` is of use if it is not Fault::none.
int c2c_layers(void* pool, const LayerRecord* layers, int64_t count, const StepRecord* step,
               int64_t* where) {
  return int(LayerRunner(pool_of(pool), *step).run(layers, count, where));
}

int c2c_attend(void* pool, const LayerRecord* layer, const StepRecord* step, float* out,
               int64_t* where) {
  return int(LayerRunner(pool_of(pool), *step).run_attention(*layer, out, where));
}

int64_t c2c_sample(void* pool, const SampleRow* rows, int64_t count, int64_t vocab, int32_t* ids,
                   float* logprobs, int32_t* top_ids, float* top_logprobs, int64_t top_stride) {
  for (int64_t i = 0; i < count; ++i)
    if (!ids_fit(rows[i], vocab)) return i;
  const int parts = count * vocab < 30'000 ? 1 : pool_of(pool).size();
  pool_of(pool).run(parts, [=](int part, int all) {
    thread_local SampleBuffers buffers;
    for (int64_t i = count * part / all; i < count * (part + 1) / all; ++i)
      sample_row(rows[i], vocab, buffers,
                 {ids + i, logprobs + i, top_ids + i * top_stride, top_logprobs + i * top_stride});
  });
  return -1;
}

void c2c_convert(void* to, int to_type, const void* from, int from_type, int64_t n) {
  convert(to, Dtype(to_type), from, Dtype(from_type), n);
}

#if defined(__PCLMUL__)
uint32_t c2c_crc32(const void* data, int64_t size) {
  return crc32(static_cast<const uint8_t*>(data), size);
}
#endif

// The ceilings benchmarks compare with.
float c2c_read(void* pool, const float* data, int64_t n) {
  return read_all(pool_of(pool), data, n);
}
double c2c_multiply(void* pool, int64_t rounds) { return multiply_all(pool_of(pool), rounds); }
}
#pragma GCC visibility pop
