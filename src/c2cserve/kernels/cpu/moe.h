// Mixture of experts: route, then each chosen expert once over all its tokens.
#pragma once
#include <algorithm>
#include <vector>

#include "linear.h"
#include "rowwise.h"

namespace c2c {

// Softmax over all experts, the top k (ties to the lower index), optionally renormalised. `p` has
// room for the experts, rounded up to whole vectors.
inline void route_row(const float* logits, int64_t experts, int64_t k, bool renormalize, float* p,
                      int32_t* ids, float* weights) {
  const vec peak = splat(*std::max_element(logits, logits + experts));
  vec totals = zero();
  for (int64_t e = 0; e < experts; e += kLanes) {
    const int rest = int(std::min<int64_t>(kLanes, experts - e));
    vec share = exp(sub(load_tail(logits + e, rest), peak));
    store(p + e, share);
    if (rest < kLanes) share = load_tail(p + e, rest);  // zeros behind the last expert
    totals = add(totals, share);
  }
  const float total = sum(totals);
  float chosen = 0.0f;
  for (int64_t i = 0; i < k; ++i) {
    const int64_t best = std::max_element(p, p + experts) - p;
    ids[i] = int32_t(best);
    weights[i] = p[best] / total;
    chosen += weights[i];
    p[best] = -1.0f;
  }
  if (renormalize)
    for (int64_t i = 0; i < k; ++i) weights[i] /= chosen;
}

struct RouteArgs {
  const float* logits;  // [T, experts]
  int64_t tokens, experts, k;
  bool renormalize;
  int32_t* ids;    // [T, k]
  float* weights;  // [T, k]
};

inline void route(ThreadPool& pool, const RouteArgs& a) {
  const int parts = a.tokens * a.experts * (a.k + 8) < 100'000 ? 1 : pool.size();
  pool.run(parts, [&](int part, int all) {
    std::vector<float> p(size_t((a.experts + kLanes - 1) / kLanes * kLanes));
    for (int64_t t = a.tokens * part / all; t < a.tokens * (part + 1) / all; ++t)
      route_row(a.logits + t * a.experts, a.experts, a.k, a.renormalize, p.data(), a.ids + t * a.k,
                a.weights + t * a.k);
  });
}

struct MoeArgs {
  float* out;  // [T, hidden], overwritten
  const float* x;
  const int32_t* ids;    // [T, k]
  const float* weights;  // [T, k]
  const void *w13, *w2;  // [experts, 2 inner, hidden], [experts, hidden, inner]
  Dtype dtype;
  int64_t tokens, k, experts, hidden, inner;

  int64_t item() const { return dtype == Dtype::f32 ? 4 : 2; }
};

// into += weight * from
inline void add_scaled(float* into, const float* from, float weight, int64_t n) {
  const vec w = splat(weight);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(into + i, fma(w, load(from + i), load(into + i)));
  if (int rest = int(n - i); rest > 0)
    store_tail(into + i, fma(w, load_tail(from + i, rest), load_tail(into + i, rest)), rest);
}

// What an expert works in, kept from one to the next.
struct MoeBuffers {
  Scratch x, act, y;
};

// An expert's product and the one after it, to `y`. `row(i)` is the i-th of its rows.
template <typename Row>
void apply_expert(ThreadPool& pool, const MoeArgs& a, int64_t expert, int64_t m, const Row& row,
                  float* y, MoeBuffers& b) {
  const int64_t h = a.hidden, n = a.inner;
  const auto* w13 = static_cast<const uint8_t*>(a.w13) + expert * 2 * n * h * a.item();
  const auto* w2 = static_cast<const uint8_t*>(a.w2) + expert * n * h * a.item();
  LinearArgs gated{nullptr, n, nullptr, h, w13, h, nullptr, Dtype::f32, m, n, h, true};
  LinearArgs down{y, h, nullptr, n, w2, n, nullptr, Dtype::f32, m, h, n};
#if defined(C2C_TILES)
  if (a.dtype == Dtype::bf16) {
    auto* tiles = reinterpret_cast<bf16*>(b.x.room(tile_linear::tiled_size(m, h) / 2));
    tile_linear::pack_rows(pool, tiles, m, h, row);
    gated.tiled_x = tiles;
    return feed_forward(pool, gated, down, a.dtype);
  }
#endif
  float* x = b.x.room(m * h);
  pool.rows(m, h, [&](int64_t i) { std::copy_n(row(i), h, x + i * h); });
  gated.x = x;
  down.x = gated.out = b.act.room(m * n);
  feed_forward(pool, gated, down, a.dtype);
}

// One expert over the (token, choice) pairs that picked it. A token picks an expert at most once,
// so rows of the output are added to by one thread at a time.
inline void run_expert(ThreadPool& pool, const MoeArgs& a, int64_t expert,
                       const std::vector<int64_t>& picks, MoeBuffers& b) {
  const int64_t m = int64_t(picks.size()), h = a.hidden;
  float* y = b.y.room(m * h);
  apply_expert(
      pool, a, expert, m,
      [&](int64_t i) { return a.x + picks[size_t(i)] / a.k * h; }, y, b);
  pool.rows(m, h, [&](int64_t i) {
    const int64_t pick = picks[size_t(i)];
    add_scaled(a.out + pick / a.k * h, y + i * h, a.weights[pick], h);
  });
}

// Experts in ascending order, so a token's sum is always taken in the same order. The first choice
// that is no expert (or repeats one of its token), or -1: nothing is written then.
inline int64_t moe_experts(ThreadPool& pool, const MoeArgs& a) {
  std::vector<std::vector<int64_t>> picks(static_cast<size_t>(a.experts));
  for (int64_t i = 0; i < a.tokens * a.k; ++i) {
    if (a.ids[i] < 0 || a.ids[i] >= a.experts) return i;
    auto& list = picks[size_t(a.ids[i])];
    if (!list.empty() && list.back() / a.k == i / a.k) return i;
    list.push_back(i);
  }
  std::memset(a.out, 0, size_t(a.tokens * a.hidden) * sizeof(float));
  MoeBuffers buffers;
  for (int64_t e = 0; e < a.experts; ++e)
    if (!picks[size_t(e)].empty()) run_expert(pool, a, e, picks[size_t(e)], buffers);
  return -1;
}

}  // namespace c2c
