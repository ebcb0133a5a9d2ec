// Drawing tokens: penalties, filters and a counter-based random stream, one row at a time.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "simd.h"

namespace c2c {

// One row's parameters; laid out for ctypes (8-byte fields first).
struct SampleRow {
  const float* logits;
  const int32_t *prompt, *output;  // histories for the penalties
  const int32_t* bias_ids;
  const float* bias;
  const int32_t* banned;
  int64_t prompt_len, output_len, bias_len, banned_len;
  uint64_t seed, position;
  int64_t top_k;
  int64_t top_logprobs;  // -1: no log-probabilities wanted
  float temperature, top_p, min_p, repetition, presence, frequency;
};

struct SampleResult {
  int32_t* id;  // -1 when the row holds a NaN or an infinity
  float* logprob;
  int32_t* top_ids;  // [top_logprobs]
  float* top_logprobs;
};

// Philox 4x32-10: the stream is a function of (seed, position), so a resumed request draws what it
// would have drawn. Returns 53 random bits as a number in [0, 1).
inline double philox(uint64_t seed, uint64_t position) {
  uint32_t c[4] = {uint32_t(position), uint32_t(position >> 32), 0, 0};
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int i = 0; i < 10; ++i) {
    uint64_t a = uint64_t(0xD2511F53u) * c[0], b = uint64_t(0xCD9E8D57u) * c[2];
    uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ k0, uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ k1, uint32_t(a)};
    std::copy(next, next + 4, c);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return double((uint64_t(c[0]) << 21) ^ (uint64_t(c[1]) >> 11)) * 0x1p-53;
}

struct Peak {
  int32_t id;
  float value;
  bool finite;
};

inline Peak find_peak(const float* l, int64_t n) {
  vec best = splat(-std::numeric_limits<float>::infinity()), poison = zero();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    vec v = load(l + i);
    best = max(best, v);
    poison = fma(v, zero(), poison);
  }
  float value = largest(best), bad = sum(poison);
  for (; i < n; ++i) {
    value = l[i] > value ? l[i] : value;
    bad += l[i] * 0.0f;
  }
  if (bad != 0.0f) return {-1, value, false};  // NaN compares unequal
  int32_t id = 0;
  while (id < n && l[id] != value) ++id;
  return {id, value, true};
}

inline double log_sum_exp(const float* l, int64_t n, float peak) {
  double total = 0;
  int64_t i = 0;
  while (i + kLanes <= n) {  // short float sums, gathered in double
    vec part = zero();
    for (int j = 0; j < 64 && i + kLanes <= n; ++j, i += kLanes)
      part = add(part, exp(sub(load(l + i), splat(peak))));
    total += double(sum(part));
  }
  for (; i < n; ++i) total += double(exp1(l[i] - peak));
  return std::log(total) + double(peak);
}

// Penalties as vLLM and transformers define them: repetition over prompt and output, presence and
// frequency over the output only.
inline void penalize(std::vector<float>& l, const SampleRow& r) {
  for (int64_t i = 0; i < r.bias_len; ++i) l[size_t(r.bias_ids[i])] += r.bias[i];
  if (r.repetition != 1.0f) {
    std::vector<bool> seen(l.size());
    auto repeat = [&](const int32_t* ids, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        size_t id = size_t(ids[i]);
        if (seen[id]) continue;
        seen[id] = true;
        l[id] = l[id] > 0 ? l[id] / r.repetition : l[id] * r.repetition;
      }
    };
    repeat(r.prompt, r.prompt_len);
    repeat(r.output, r.output_len);
  }
  if (r.presence != 0.0f || r.frequency != 0.0f) {
    std::vector<bool> seen(l.size());
    for (int64_t i = 0; i < r.output_len; ++i) {
      size_t id = size_t(r.output[i]);
      l[id] -= r.frequency;
      if (!seen[id]) l[id] -= r.presence;
      seen[id] = true;
    }
  }
  for (int64_t i = 0; i < r.banned_len; ++i) l[size_t(r.banned[i])] = -std::numeric_limits<float>::infinity();
}

// Keep the fewest most probable candidates whose mass reaches top_p, sorting no more than needed.
inline void keep_top_p(std::vector<int32_t>& ids, const std::vector<float>& p, float top_p) {
  auto before = [&](int32_t a, int32_t b) {
    return p[size_t(a)] != p[size_t(b)] ? p[size_t(a)] > p[size_t(b)] : a < b;
  };
  double total = 0;
  for (int32_t id : ids) total += double(p[size_t(id)]);
  size_t sorted = 0, count = 64;
  double mass = 0;
  while (sorted < ids.size()) {
    size_t end = std::min(count, ids.size());
    std::partial_sort(ids.begin() + long(sorted), ids.begin() + long(end), ids.end(), before);
    for (; sorted < end; ++sorted) {
      mass += double(p[size_t(ids[sorted])]);
      if (mass >= double(top_p) * total) {
        ids.resize(sorted + 1);
        return;
      }
    }
    count *= 8;
  }
}

inline int32_t draw(const std::vector<float>& l, const SampleRow& r) {
  const int64_t n = int64_t(l.size());
  const float peak = *std::max_element(l.begin(), l.end());
  std::vector<float> p(l.size());
  const vec scale = splat(1.0f / r.temperature), top = splat(peak);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(p.data() + i, exp(mul(sub(load(l.data() + i), top), scale)));
  for (; i < n; ++i) p[size_t(i)] = exp1((l[size_t(i)] - peak) / r.temperature);
  std::vector<int32_t> ids;
  ids.reserve(l.size());
  for (i = 0; i < n; ++i)  // a banned id is -inf: exp's floor is not zero
    if (p[size_t(i)] >= r.min_p && l[size_t(i)] > -std::numeric_limits<float>::infinity()) ids.push_back(int32_t(i));
  if (r.top_k > 0 && r.top_k < int64_t(ids.size())) {
    auto before = [&](int32_t a, int32_t b) {
      return l[size_t(a)] != l[size_t(b)] ? l[size_t(a)] > l[size_t(b)] : a < b;
    };
    std::nth_element(ids.begin(), ids.begin() + long(r.top_k - 1), ids.end(), before);
    ids.resize(size_t(r.top_k));
  }
  if (r.top_p < 1.0f) keep_top_p(ids, p, r.top_p);
  std::sort(ids.begin(), ids.end());
  double total = 0;
  for (int32_t id : ids) total += double(p[size_t(id)]);
  double target = philox(r.seed, r.position) * total, mass = 0;
  for (int32_t id : ids)
    if ((mass += double(p[size_t(id)])) > target) return id;
  return ids.back();
}

inline void sample_row(const SampleRow& r, int64_t n, const SampleResult& out) {
  const Peak peak = find_peak(r.logits, n);
  *out.id = peak.id;
  if (!peak.finite) return;
  const bool adjusted = r.bias_len || r.banned_len || r.repetition != 1.0f || r.presence != 0.0f || r.frequency != 0.0f;
  if (adjusted || r.temperature > 0.0f) {
    std::vector<float> l(r.logits, r.logits + n);
    if (adjusted) penalize(l, r);
    *out.id = r.temperature > 0.0f ? draw(l, r) : int32_t(std::max_element(l.begin(), l.end()) - l.begin());
  }
  if (r.top_logprobs < 0) return;
  const double norm = log_sum_exp(r.logits, n, peak.value);
  *out.logprob = float(double(r.logits[*out.id]) - norm);
  if (r.top_logprobs == 0) return;
  std::vector<int32_t> ids(static_cast<size_t>(n));
  std::iota(ids.begin(), ids.end(), 0);
  std::partial_sort(ids.begin(), ids.begin() + long(r.top_logprobs), ids.end(), [&](int32_t a, int32_t b) {
    return r.logits[a] != r.logits[b] ? r.logits[a] > r.logits[b] : a < b;
  });
  for (int64_t i = 0; i < r.top_logprobs; ++i) {
    out.top_ids[i] = ids[size_t(i)];
    out.top_logprobs[i] = float(double(r.logits[ids[size_t(i)]]) - norm);
  }
}

}  // namespace c2c
