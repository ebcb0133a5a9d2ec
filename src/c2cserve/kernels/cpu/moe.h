// Mixture of experts: route, then each chosen expert once over all its tokens.
#pragma once
#include <algorithm>
#include <vector>

#include "linear.h"
#include "rowwise.h"

namespace c2c {

// Softmax over all experts, the top k (ties to the lower index), optionally renormalised.
inline void route_row(const float* logits, int64_t experts, int64_t k, bool renormalize, int32_t* ids, float* weights) {
  float peak = logits[0], total = 0.0f;
  for (int64_t e = 1; e < experts; ++e) peak = logits[e] > peak ? logits[e] : peak;
  std::vector<float> p(static_cast<size_t>(experts));
  for (int64_t e = 0; e < experts; ++e) total += p[size_t(e)] = exp1(logits[e] - peak);
  float chosen = 0.0f;
  for (int64_t i = 0; i < k; ++i) {
    int64_t best = std::max_element(p.begin(), p.end()) - p.begin();
    ids[i] = int32_t(best);
    weights[i] = p[size_t(best)] / total;
    chosen += weights[i];
    p[size_t(best)] = -1.0f;
  }
  if (renormalize)
    for (int64_t i = 0; i < k; ++i) weights[i] /= chosen;
}

struct MoeArgs {
  float* out;  // [T, hidden], overwritten
  const float* x;
  const int32_t* ids;    // [T, k]
  const float* weights;  // [T, k]
  const void *w13, *w2;  // [experts, 2 inner, hidden], [experts, hidden, inner]
  int64_t tokens, k, experts, hidden, inner;
  int64_t item;
};

// Experts in ascending order, so a token's sum is always taken in the same order.
inline void moe_experts(ThreadPool& pool, const MoeArgs& a, Dtype dtype) {
  std::memset(a.out, 0, size_t(a.tokens * a.hidden) * sizeof(float));
  std::vector<std::vector<int64_t>> chosen(static_cast<size_t>(a.experts));
  for (int64_t i = 0; i < a.tokens * a.k; ++i) chosen[size_t(a.ids[i])].push_back(i);
  std::vector<float> x, gate_up, act, y;
  for (int64_t e = 0; e < a.experts; ++e) {
    const auto& picks = chosen[size_t(e)];
    if (picks.empty()) continue;
    const int64_t m = int64_t(picks.size());
    x.resize(size_t(m * a.hidden));
    gate_up.resize(size_t(m * 2 * a.inner));
    act.resize(size_t(m * a.inner));
    y.resize(size_t(m * a.hidden));
    for (int64_t i = 0; i < m; ++i)
      std::copy_n(a.x + picks[size_t(i)] / a.k * a.hidden, a.hidden, x.data() + i * a.hidden);
    const auto* w13 = static_cast<const uint8_t*>(a.w13) + e * 2 * a.inner * a.hidden * a.item;
    const auto* w2 = static_cast<const uint8_t*>(a.w2) + e * a.inner * a.hidden * a.item;
    linear(pool, {gate_up.data(), 2 * a.inner, x.data(), a.hidden, w13, a.hidden, nullptr, m, 2 * a.inner, a.hidden}, dtype);
    for (int64_t i = 0; i < m; ++i) {
      const float* row = gate_up.data() + i * 2 * a.inner;
      silu_mul_row(act.data() + i * a.inner, row, row + a.inner, a.inner);
    }
    linear(pool, {y.data(), a.hidden, act.data(), a.inner, w2, a.inner, nullptr, m, a.hidden, a.inner}, dtype);
    for (int64_t i = 0; i < m; ++i) {
      float* into = a.out + picks[size_t(i)] / a.k * a.hidden;
      const float* from = y.data() + i * a.hidden;
      vec weight = splat(a.weights[picks[size_t(i)]]);
      int64_t h = 0;
      for (; h + kLanes <= a.hidden; h += kLanes) store(into + h, fma(weight, load(from + h), load(into + h)));
      if (int rest = int(a.hidden - h); rest > 0)
        store_tail(into + h, fma(weight, load_tail(from + h, rest), load_tail(into + h, rest)), rest);
    }
  }
}

}  // namespace c2c
