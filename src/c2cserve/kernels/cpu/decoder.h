// Whole decoder layers in one call: the operators of a layer one after another, out of a record of
// its weights that is made once. What they compute is what they compute one by one, bit for bit.
//
//   x = norm(hidden)    y = o(attention(qkv(x)))      hidden += y
//   x = norm(hidden)    y = down(silu(gate) * up)     hidden += y        or experts for the latter
#pragma once
#include "attention.h"
#include "kv.h"
#include "linear.h"
#include "moe.h"
#include "rows.h"

namespace c2c {

// Laid out for Python's struct module, like all records: 8-byte fields.
struct Matrix {
  const void* w;      // [rows, columns], dense
  const float* bias;  // [rows] or null
  int64_t rows, columns;
};

struct LayerRecord {
  int64_t index, dtype, window;
  const float *input_norm, *post_norm;  // [hidden]
  const float *q_norm, *k_norm;         // [head_dim] or null
  Matrix qkv, o;
  Matrix gate_up, down;     // of a dense layer
  Matrix router;            // of a sparse one
  const void *w13, *w2;     // [experts, 2 inner, hidden], [experts, hidden, inner]
  int64_t inner, per_token, renormalize;

  bool sparse() const { return router.w != nullptr; }
};

// A step's rows, and what all layers of a model share.
struct StepRecord {
  float* hidden;  // [tokens, width]
  int64_t tokens, width, heads;
  const int32_t* positions;
  const int64_t* slots;
  const int32_t *q_start, *context_len;
  const int64_t* block_table;
  int64_t table_stride, seqs;
  const float *cos, *sin;  // [rope_rows, head_dim / 2]
  int64_t rope_rows;
  uint8_t* arena;
  int64_t arena_bytes, kv_dtype, kv_layers, kv_heads, head_dim;
  float eps, scale;

  KvArgs kv(int64_t layer) const {
    return {arena, arena_bytes, kv_layers, kv_heads, head_dim, layer,
            Dtype(kv_dtype) == Dtype::f32 ? 4 : 2};
  }
};

enum class Fault : int { none = 0, token = 1, sequence = 2, choice = 3 };

// Runs layers of one step. Activations lie in the pool's workspace: nothing in it outlives a call.
class LayerRunner {
 public:
  LayerRunner(ThreadPool& pool, const StepRecord& step) : pool_(pool), s_(step) {}

  // Layers in order, `hidden` in place. A fault is of token or sequence `where`: those that lie
  // outside of what there is are found before anything is written.
  Fault run(const LayerRecord* layers, int64_t count, int64_t* where) {
    reserve(layers, count);
    if (Fault fault = misplaced(layers[0], where); fault != Fault::none) return fault;
    for (int64_t i = 0; i < count; ++i) {
      const LayerRecord& l = layers[i];
      if (i == 0)
        rms_norm(pool_, x_, s_.hidden, l.input_norm, s_.eps, s_.tokens, s_.width);
      else
        add_rms_norm(pool_, x_, y_, s_.hidden, l.input_norm, s_.eps, s_.tokens, s_.width);
      attend(l);
      add_rms_norm(pool_, x_, y_, s_.hidden, l.post_norm, s_.eps, s_.tokens, s_.width);
      if (!l.sparse())
        run_dense(l);
      else if (Fault fault = experts(l, where); fault != Fault::none)
        return fault;
    }
    add(pool_, s_.hidden, y_, s_.tokens, s_.width);
    return Fault::none;
  }

  // The first half of a layer; `out` becomes what its second half begins with.
  Fault run_attention(const LayerRecord& layer, float* out, int64_t* where) {
    reserve(&layer, 1);
    if (Fault fault = misplaced(layer, where); fault != Fault::none) return fault;
    rms_norm(pool_, x_, s_.hidden, layer.input_norm, s_.eps, s_.tokens, s_.width);
    attend(layer);
    add_rms_norm(pool_, out, y_, s_.hidden, layer.post_norm, s_.eps, s_.tokens, s_.width);
    return Fault::none;
  }

 private:
  RopeStoreArgs rope_args(const LayerRecord& l) const {
    return {s_.kv(l.index), wide_,    s_.positions, s_.cos,    s_.sin, s_.rope_rows,
            l.q_norm,       l.k_norm, s_.slots,     s_.tokens, s_.heads, s_.eps};
  }

  AttentionArgs attention_args(const LayerRecord& l) const {
    return {s_.kv(l.index), wide_,         l.qkv.rows,    wide_ + s_.tokens * l.qkv.rows,
            s_.q_start,     s_.context_len, s_.block_table, s_.table_stride,
            s_.seqs,        s_.tokens,      s_.heads,       s_.scale,
            l.window};
  }

  // Where things lie is the same in all layers: one of them is asked.
  Fault misplaced(const LayerRecord& layer, int64_t* where) const {
    if ((*where = misplaced_token(rope_args(layer))) >= 0) return Fault::token;
    if ((*where = misplaced_sequence(attention_args(layer))) >= 0) return Fault::sequence;
    return Fault::none;
  }

  void reserve(const LayerRecord* layers, int64_t count) {
    int64_t wide = 0;
    for (const LayerRecord* l = layers; l < layers + count; ++l) {
      const int64_t attending = l->qkv.rows + l->o.columns;
      const int64_t feeding = l->sparse() ? l->router.rows : l->down.columns;
      wide = std::max({wide, attending, feeding});
    }
    x_ = pool_.workspace(s_.tokens * (2 * s_.width + wide));
    y_ = x_ + s_.tokens * s_.width;
    wide_ = y_ + s_.tokens * s_.width;
  }

  LinearArgs product(const Matrix& m, const float* x, float* out) const {
    return {out,    m.rows,       x,         m.columns, m.w,      m.columns,
            m.bias, Dtype::f32, s_.tokens, m.rows,    m.columns};
  }

  void multiply(const LayerRecord& l, const Matrix& m, const float* x, float* out) {
    linear(pool_, product(m, x, out), Dtype(l.dtype));
  }

  void attend(const LayerRecord& l) {
    multiply(l, l.qkv, x_, wide_);
    rope_store(pool_, Dtype(s_.kv_dtype), rope_args(l));
    const AttentionArgs a = attention_args(l);
    attention(pool_, Dtype(s_.kv_dtype), a);
    multiply(l, l.o, a.out, y_);
  }

  void run_dense(const LayerRecord& l) {
    LinearArgs gated = product(l.gate_up, x_, wide_);
    gated.gated = true;
    gated.n = gated.out_stride = l.down.columns;
    feed_forward(pool_, gated, product(l.down, wide_, y_), Dtype(l.dtype));
  }

  // Values that are not numbers choose an expert twice.
  Fault experts(const LayerRecord& l, int64_t* where) {
    std::vector<int32_t> ids(size_t(s_.tokens * l.per_token));
    std::vector<float> weights(ids.size());
    linear_exact(pool_, product(l.router, x_, wide_), Dtype(l.dtype));
    route(pool_, {wide_, s_.tokens, l.router.rows, l.per_token, l.renormalize != 0, ids.data(),
                  weights.data()});
    const int64_t bad =
        moe_experts(pool_, {y_, x_, ids.data(), weights.data(), l.w13, l.w2, Dtype(l.dtype),
                            s_.tokens, l.per_token, l.router.rows, s_.width, l.inner});
    *where = bad / l.per_token;
    return bad < 0 ? Fault::none : Fault::choice;
  }

  ThreadPool& pool_;
  const StepRecord& s_;
  float *x_ = nullptr, *y_ = nullptr;  // [tokens, width]
  float* wide_ = nullptr;              // what lies between them
};

}  // namespace c2c
