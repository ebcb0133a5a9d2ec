// Drawing tokens: penalties, filters and a counter-based random stream, one row at a time.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "simd.h"

namespace c2c {

// One row's parameters; laid out for Python's struct module (8-byte fields first).
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

  bool adjusted() const {
    return bias_len || banned_len || repetition != 1.0f || presence != 0.0f || frequency != 0.0f;
  }
};

struct SampleResult {
  int32_t* id;  // -1 when the row holds a NaN or an infinity, or every token is banned
  float* logprob;
  int32_t* top_ids;  // [top_logprobs]
  float* top_logprobs;
};

// Kept from row to row.
struct SampleBuffers {
  std::vector<float> logits, p;
  std::vector<int32_t> ids, history;
};

// Philox 4x32-10 (Salmon et al., SC 2011): the stream is a function of (seed, position), so a
// resumed request draws what it would have drawn. Returns 53 random bits as a number in [0, 1).
inline double philox(uint64_t seed, uint64_t position) {
  uint32_t c[4] = {uint32_t(position), uint32_t(position >> 32), 0, 0};
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int i = 0; i < 10; ++i) {
    uint64_t a = uint64_t(0xD2511F53u) * c[0], b = uint64_t(0xCD9E8D57u) * c[2];
    uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ k0, uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ k1,
                        uint32_t(a)};
    std::copy(next, next + 4, c);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return double((uint64_t(c[0]) << 21) ^ (uint64_t(c[1]) >> 11)) * 0x1p-53;
}

struct Peak {
  int64_t id;  // the lowest of equal ones
  float value;
  bool finite;
};

// One pass: the maximum of every chunk; the first chunk that holds the best is searched for its id.
inline Peak find_peak(const float* l, int64_t n) {
  constexpr int64_t kChunk = 64 * kLanes;
  float value = -std::numeric_limits<float>::infinity(), bad = 0.0f;
  int64_t chunk = 0;
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    const int64_t end = std::min(begin + kChunk, n);
    vec best = splat(value), poison = zero();
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      vec v = load(l + i);
      best = max(best, v);
      poison = fma(v, zero(), poison);  // 0 * NaN and 0 * infinity are NaN
    }
    float top = largest(best);
    bad += sum(poison);
    for (; i < end; ++i) {
      top = l[i] > top ? l[i] : top;
      bad += l[i] * 0.0f;
    }
    if (top > value) {
      value = top;
      chunk = begin;
    }
  }
  if (bad != 0.0f) return {-1, value, false};  // NaN compares unequal
  return {std::find(l + chunk, l + n, value) - l, value, true};
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

// Penalties as vLLM and transformers define them, after the bias: repetition once per token of
// prompt or output, presence and frequency over the output only.
inline void penalize(SampleBuffers& b, const SampleRow& r) {
  std::vector<float>& l = b.logits;
  for (int64_t i = 0; i < r.bias_len; ++i) l[size_t(r.bias_ids[i])] += r.bias[i];
  std::vector<int32_t>& known = b.history;
  if (r.repetition != 1.0f) {
    known.assign(r.prompt, r.prompt + r.prompt_len);
    known.insert(known.end(), r.output, r.output + r.output_len);
    std::sort(known.begin(), known.end());
    known.erase(std::unique(known.begin(), known.end()), known.end());
    for (int32_t id : known) {
      float& value = l[size_t(id)];
      value = value > 0 ? value / r.repetition : value * r.repetition;
    }
  }
  if (r.presence != 0.0f || r.frequency != 0.0f) {
    known.assign(r.output, r.output + r.output_len);
    std::sort(known.begin(), known.end());
    for (size_t i = 0; i < known.size();) {
      size_t end = i;
      while (end < known.size() && known[end] == known[i]) ++end;
      l[size_t(known[i])] -= r.frequency * float(end - i) + r.presence;
      i = end;
    }
  }
  const float never = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < r.banned_len; ++i) l[size_t(r.banned[i])] = never;
}

// Candidates in the order of their logits; equal ones by id.
struct Better {
  const float* l;
  bool operator()(int32_t a, int32_t b) const { return l[a] != l[b] ? l[a] > l[b] : a < b; }
};

// Keep the fewest best candidates whose mass reaches `top_p` of all. Most often that is a few;
// otherwise the border is found by halving, which is linear in the number of candidates.
inline void keep_top_p(std::vector<int32_t>& ids, const float* l, const float* p, float top_p) {
  const Better better{l};
  auto mass_of = [&](size_t from, size_t to) {
    double mass = 0;
    for (; from < to; ++from) mass += double(p[ids[from]]);
    return mass;
  };
  const double target = double(top_p) * mass_of(0, ids.size());
  constexpr size_t kFew = 64;
  double before = 0;
  size_t low = 0, high = ids.size();
  for (size_t middle = std::min(kFew, high); high - low > kFew; middle = (low + high) / 2) {
    std::nth_element(ids.begin() + long(low), ids.begin() + long(middle), ids.begin() + long(high),
                     better);
    const double mass = mass_of(low, middle);
    if (before + mass >= target) {
      high = middle;
    } else {
      before += mass;
      low = middle;
    }
  }
  std::sort(ids.begin() + long(low), ids.begin() + long(high), better);
  while (low < high && before < target) before += double(p[ids[low++]]);
  ids.resize(std::max<size_t>(low, 1));
}

// A token by its adjusted logits, which reach `peak`.
inline int32_t draw(SampleBuffers& b, const SampleRow& r, float peak) {
  const int64_t n = int64_t(b.logits.size());
  const float* l = b.logits.data();
  b.p.resize(size_t(n));
  float* p = b.p.data();
  const float scale = std::min(1.0f / r.temperature, FLT_MAX);  // 0 * infinity would be a NaN
  for (int64_t i = 0; i < n; i += kLanes) {
    const int rest = int(std::min<int64_t>(kLanes, n - i));
    if (rest == kLanes)
      store(p + i, exp(mul(sub(load(l + i), splat(peak)), splat(scale))));
    else
      store_tail(p + i, exp(mul(sub(load_tail(l + i, rest), splat(peak)), splat(scale))), rest);
  }
  for (int64_t i = 0; i < r.banned_len; ++i) p[r.banned[i]] = 0.0f;  // exp has a floor above it
  b.ids.clear();
  for (int64_t i = 0; i < n; ++i)
    if (p[i] >= r.min_p && p[i] > 0.0f) b.ids.push_back(int32_t(i));
  const bool some = r.top_k > 0 && r.top_k < int64_t(b.ids.size());
  if (some) {
    std::nth_element(b.ids.begin(), b.ids.begin() + long(r.top_k - 1), b.ids.end(), Better{l});
    b.ids.resize(size_t(r.top_k));
  }
  if (r.top_p < 1.0f) keep_top_p(b.ids, l, p, r.top_p);
  if (some || r.top_p < 1.0f) std::sort(b.ids.begin(), b.ids.end());
  double total = 0, mass = 0;
  for (int32_t id : b.ids) total += double(p[id]);
  const double target = philox(r.seed, r.position) * total;
  for (int32_t id : b.ids)
    if ((mass += double(p[id])) > target) return id;
  return b.ids.back();
}

inline void report_logprobs(const SampleRow& r, int64_t n, float peak, SampleBuffers& b,
                            const SampleResult& out) {
  const double norm = log_sum_exp(r.logits, n, peak);
  *out.logprob = float(double(r.logits[*out.id]) - norm);
  if (r.top_logprobs == 0) return;
  b.ids.resize(size_t(n));
  std::iota(b.ids.begin(), b.ids.end(), 0);
  const auto end = b.ids.begin() + long(r.top_logprobs);
  std::partial_sort(b.ids.begin(), end, b.ids.end(), Better{r.logits});
  for (int64_t i = 0; i < r.top_logprobs; ++i) {
    out.top_ids[i] = b.ids[size_t(i)];
    out.top_logprobs[i] = float(double(r.logits[out.top_ids[i]]) - norm);
  }
}

inline void sample_row(const SampleRow& r, int64_t n, SampleBuffers& b, const SampleResult& out) {
  const Peak raw = find_peak(r.logits, n);
  *out.id = int32_t(raw.id);
  if (!raw.finite) return;
  if (r.adjusted() || r.temperature > 0.0f) {
    b.logits.assign(r.logits, r.logits + n);
    if (r.adjusted()) penalize(b, r);
    const auto best = std::max_element(b.logits.begin(), b.logits.end());
    if (!(*best > -std::numeric_limits<float>::infinity())) {
      *out.id = -1;
      return;
    }
    *out.id = r.temperature > 0.0f ? draw(b, r, *best) : int32_t(best - b.logits.begin());
  }
  if (r.top_logprobs >= 0) report_logprobs(r, n, raw.value, b, out);
}

// Do all token ids of a row's histories, bias and bans name tokens?
inline bool ids_fit(const SampleRow& r, int64_t n) {
  auto fit = [n](const int32_t* ids, int64_t count) {
    return std::all_of(ids, ids + count, [n](int32_t id) { return id >= 0 && id < n; });
  };
  return fit(r.prompt, r.prompt_len) && fit(r.output, r.output_len) &&
         fit(r.bias_ids, r.bias_len) && fit(r.banned, r.banned_len);
}

}  // namespace c2c
