// Whole decoder layers in one call: the operators of a layer one after another, out of a record of
// its weights that is made once. What they compute is what they compute one by one, bit for bit.
//
//   x = norm(hidden)    y = o(attention(qkv(x)))      hidden += y
//   x = norm(hidden)    y = down(silu(gate) * up)     hidden += y        or experts for the latter
#pragma once
#include "attention/attention.h"
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
  // Rows of hidden that are read after these layers, ascending: the last layer leaves out what only
  // others need, and those hold anything afterwards. Null: all rows.
  const int64_t* wanted;
  int64_t wanted_rows;

  KvArgs kv(int64_t layer) const {
    return {arena, arena_bytes, kv_layers, kv_heads, head_dim, layer,
            Dtype(kv_dtype) == Dtype::f32 ? 4 : 2};
  }
};

enum class Fault : int { none = 0, token = 1, sequence = 2, choice = 3, row = 4 };

// Runs layers of one step. Activations lie in the pool's workspace: nothing in it outlives a call.
class LayerRunner {
 public:
  LayerRunner(ThreadPool& pool, const StepRecord& step)
      : pool_(pool), s_(step), hidden_(step.hidden), rows_(step.tokens) {}

  // Layers in order, `hidden` in place. A fault is of token or sequence `where`: those that lie
  // outside of what there is are found before anything is written.
  Fault run(const LayerRecord* layers, int64_t count, int64_t* where) {
    const ThreadPool::Awake awake(pool_);
    reserve(layers, count);
    if (Fault fault = misplaced(layers[0], where); fault != Fault::none) return fault;
    for (int64_t i = 0; i < count; ++i) {
      const LayerRecord& l = layers[i];
      norm(l.input_norm, i == 0 ? nullptr : y_, packs(l));
      const bool fewer = i + 1 == count && narrows();
      attend(l, fewer);
      if (rows_ == 0) return Fault::none;
      norm(l.post_norm, y_, packs(l) && !l.sparse());  // experts take rows of x one by one
      if (!l.sparse())
        run_dense(l);
      else if (Fault fault = experts(l, where); fault != Fault::none)
        return fault;
    }
    add(pool_, hidden_, y_, rows_, s_.width);
    for (int64_t i = 0; hidden_ != s_.hidden && i < rows_; ++i)
      std::copy_n(hidden_ + i * s_.width, s_.width, s_.hidden + s_.wanted[i] * s_.width);
    return Fault::none;
  }

  // The first half of a layer; `out` becomes what its second half begins with.
  Fault run_attention(const LayerRecord& layer, float* out, int64_t* where) {
    const ThreadPool::Awake awake(pool_);
    reserve(&layer, 1);
    if (Fault fault = misplaced(layer, where); fault != Fault::none) return fault;
    norm(layer.input_norm, nullptr, packs(layer));
    attend(layer, false);
    add_rms_norm(pool_, out, y_, s_.hidden, layer.post_norm, s_.eps, s_.tokens, s_.width);
    return Fault::none;
  }

 private:
  RopeStoreArgs rope_args(const LayerRecord& l) const {
    return {s_.kv(l.index), wide_,    s_.positions, s_.cos,    s_.sin, s_.rope_rows,
            l.q_norm,       l.k_norm, s_.slots,     s_.tokens, s_.heads, s_.eps};
  }

  // In rows, `out` follows those of qkv.
  AttentionArgs attention_args(const LayerRecord& l, bool as_tiles) const {
    float* out = wide_ + s_.tokens * l.qkv.rows;
    return {s_.kv(l.index), wide_,          l.qkv.rows,     out,
            s_.q_start,     s_.context_len, s_.block_table, s_.table_stride,
            s_.seqs,        s_.tokens,      s_.heads,       s_.scale,
            l.window,       as_tiles ? tiled_ : nullptr};
  }

  // Where things lie is the same in all layers: one of them is asked.
  Fault misplaced(const LayerRecord& layer, int64_t* where) const {
    if ((*where = misplaced_token(rope_args(layer))) >= 0) return Fault::token;
    if ((*where = misplaced_sequence(attention_args(layer, false))) >= 0) return Fault::sequence;
    for (int64_t i = 0, least = 0; s_.wanted && i < s_.wanted_rows; least = s_.wanted[i++] + 1)
      if (*where = s_.wanted[i]; *where < least || *where >= s_.tokens) return Fault::row;
    return Fault::none;
  }

  // Whether operators write rows as the next product's tiles read them.
  bool packs([[maybe_unused]] const LayerRecord& l) const {
#if defined(C2C_TILES)
    return Dtype(l.dtype) == Dtype::bf16;
#else
    return false;
#endif
  }

  // Attention does so with many rows. Threads that wrote few of them would share each line.
  bool packs_attended([[maybe_unused]] const LayerRecord& l, [[maybe_unused]] bool fewer) const {
#if defined(C2C_TILES)
    return packs(l) && !fewer && s_.tokens > tile_linear::kFewRows;
#else
    return false;
#endif
  }

  // Whether rows of hidden are left out in the second half of a call's last layer.
  bool narrows() const { return s_.wanted && s_.wanted_rows < s_.tokens; }

  // Floats that lie between a layer's products.
  int64_t between(const LayerRecord& l, bool last) const {
    const bool fewer = last && narrows();
    const int64_t attending = l.qkv.rows + (packs_attended(l, fewer) ? 0 : l.o.columns);
    if (l.sparse()) return s_.tokens * std::max(attending, l.router.rows);
    return s_.tokens * std::max(attending, packs(l) ? 0 : l.down.columns);
  }

  // The same of tiles of x, and of rows of x.
  int64_t in_tiles(const LayerRecord& l) const {
#if defined(C2C_TILES)
    using tile_linear::tiled_size;
    if (packs(l))
      return std::max(tiled_size(s_.tokens, s_.width), tiled_size(s_.tokens, l.o.columns)) / 2;
#endif
    return 0;
  }
  int64_t in_rows(const LayerRecord& l) const {
    return packs(l) && !l.sparse() ? 0 : s_.tokens * s_.width;
  }

  void reserve(const LayerRecord* layers, int64_t count) {
    int64_t wide = 0, tiles = 0, rows = 0;
    for (int64_t i = 0; i < count; ++i) {
      wide = std::max(wide, between(layers[i], i + 1 == count));
      tiles = std::max(tiles, in_tiles(layers[i]));
      rows = std::max(rows, in_rows(layers[i]));
    }
    const int64_t all = s_.tokens * s_.width, few = narrows() ? s_.wanted_rows * s_.width : 0;
    float* room = pool_.workspace(tiles + rows + all + few + wide);
    tiled_ = reinterpret_cast<bf16*>(room);  // first: it begins with a whole line
    x_ = room + tiles;
    y_ = x_ + rows;
    few_ = y_ + all;
    wide_ = few_ + few;
  }

  // hidden += x if there is any, then its norm: `x_`, or `tiled_`.
  void norm(const float* weight, const float* x, [[maybe_unused]] bool as_tiles) {
#if defined(C2C_TILES)
    if (as_tiles)
      return tile_linear::rms_norm_tiles(pool_, tiled_, x, hidden_, weight, s_.eps, rows_, s_.width);
#endif
    if (x)
      add_rms_norm(pool_, x_, x, hidden_, weight, s_.eps, rows_, s_.width);
    else
      rms_norm(pool_, x_, hidden_, weight, s_.eps, rows_, s_.width);
  }

  // Of rows of x, or with none of those that the operator before has left in `tiled_`.
  LinearArgs product(const Matrix& m, const float* x, float* out) const {
    LinearArgs a{out,    m.rows,     x,     m.columns, m.w,      m.columns,
                 m.bias, Dtype::f32, rows_, m.rows,    m.columns};
    if (!x) a.tiled_x = tiled_;
    return a;
  }

  void multiply(const LayerRecord& l, const Matrix& m, const float* x, float* out) {
    linear(pool_, product(m, x, out), Dtype(l.dtype));
  }

  // With `fewer`, what follows attention is for the rows that are wanted.
  void attend(const LayerRecord& l, bool fewer) {
    multiply(l, l.qkv, packs(l) ? nullptr : x_, wide_);
    rope_store(pool_, Dtype(s_.kv_dtype), rope_args(l));
    if (fewer && s_.wanted_rows == 0) {
      rows_ = 0;
      return;
    }
    const AttentionArgs a = attention_args(l, packs_attended(l, fewer));
#if defined(C2C_TILES)
    if (a.tiled_out) tile_linear::clear_ends(a.tiled_out, s_.tokens, l.o.columns);
#endif
    attention(pool_, Dtype(s_.kv_dtype), a);
    if (fewer) narrow(a.out, l.o.columns);
    multiply(l, l.o, a.tiled_out ? nullptr : a.out, y_);
  }

  // Leave the wanted rows of hidden and of what attention gave. The former go to a place of theirs.
  void narrow(float* attended, int64_t columns) {
    rows_ = s_.wanted_rows;
    for (int64_t i = 0; i < rows_; ++i) {
      const int64_t row = s_.wanted[i];  // i at least, so no row is overwritten before it is read
      std::copy_n(s_.hidden + row * s_.width, s_.width, few_ + i * s_.width);
      if (row > i) std::copy_n(attended + row * columns, columns, attended + i * columns);
    }
    hidden_ = few_;
  }

  void run_dense(const LayerRecord& l) {
    LinearArgs gated = product(l.gate_up, packs(l) ? nullptr : x_, wide_);
    gated.gated = true;
    gated.n = gated.out_stride = l.down.columns;
    feed_forward(pool_, gated, product(l.down, wide_, y_), Dtype(l.dtype));
  }

  // Values that are not numbers choose an expert twice.
  Fault experts(const LayerRecord& l, int64_t* where) {
    std::vector<int32_t> ids(size_t(rows_ * l.per_token));
    std::vector<float> weights(ids.size());
    linear_exact(pool_, product(l.router, x_, wide_), Dtype(l.dtype));
    route(pool_, {wide_, rows_, l.router.rows, l.per_token, l.renormalize != 0, ids.data(),
                  weights.data()});
    const int64_t bad =
        moe_experts(pool_, {y_, x_, ids.data(), weights.data(), l.w13, l.w2, Dtype(l.dtype),
                            rows_, l.per_token, l.router.rows, s_.width, l.inner});
    *where = bad / l.per_token;
    if (bad >= 0 && hidden_ != s_.hidden) *where = s_.wanted[*where];
    return bad < 0 ? Fault::none : Fault::choice;
  }

  ThreadPool& pool_;
  const StepRecord& s_;
  float* hidden_;  // [rows, width]: those of the step, or the wanted ones
  int64_t rows_;
  bf16* tiled_ = nullptr;              // what a product reads, as tiles of x
  float *x_ = nullptr, *y_ = nullptr;  // [rows, width]
  float* few_ = nullptr;               // wanted rows of hidden
  float* wide_ = nullptr;              // what lies between them
};

}  // namespace c2c
