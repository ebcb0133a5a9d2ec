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
  const uint32_t* mask;  // bit v % 32 of word v / 32: token v is allowed; null: all are
  int64_t prompt_len, output_len, bias_len, banned_len;
  uint64_t seed, position;
  int64_t top_k;
  int64_t top_logprobs;  // -1: no log-probabilities wanted
  float temperature, top_p, min_p, repetition, presence, frequency;

  bool allows(int64_t v) const { return !mask || (mask[v / 32] >> (v % 32) & 1); }
  // Of tokens v to v + kLanes - 1, all in the vocabulary; v is a multiple of kLanes.
  uint32_t allows_lanes(int64_t v) const { return mask[v / 32] >> (v % 32) & kAllLanes; }
  // Whether its logits change. A mask changes none: what it forbids is passed over.
  bool adjusted() const {
    return bias_len || banned_len || repetition != 1.0f || presence != 0.0f || frequency != 0.0f;
  }

 private:
  static constexpr uint32_t kAllLanes = uint32_t((uint64_t(1) << kLanes) - 1);
  static_assert(32 % kLanes == 0, "a vector's tokens lie in one word of a mask");
};

struct SampleResult {
  int32_t* id;  // -1 when the row holds a NaN or an infinity, or no token is left
  float* logprob;
  int32_t* top_ids;  // [top_logprobs]
  float* top_logprobs;
};

// Kept from row to row, and from call to call.
struct SampleBuffers {
  std::vector<float> logits, p;  // p: e^((logit - peak) / temperature), zero for what is out
  std::vector<double> masses;
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

constexpr int64_t kChunk = 1024;

struct Peak {
  int64_t id;  // the lowest of equal ones; -1 if the mask allows none
  float value;
  float of_all;  // the maximum where those that the mask forbids count, too
  bool finite;   // no value is a NaN, which is never the maximum, or an infinity
};

// One pass: the maximum of every chunk; the first chunk that holds the best is searched for its id.
template <bool kMasked>
inline Peak peak_of(const SampleRow& r, const float* l, int64_t n) {
  const float never = -std::numeric_limits<float>::infinity();
  float value = never, of_all = never, bad = 0.0f;
  int64_t chunk = n;
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    const int64_t end = std::min(begin + kChunk, n);
    vec best = splat(value), all = splat(of_all), poison = zero();
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      const vec v = load(l + i);
      all = max(v, all);
      if (kMasked) best = max(select(r.allows_lanes(i), v, splat(never)), best);
      poison = fma(v, zero(), poison);  // 0 * NaN and 0 * infinity are NaN
    }
    of_all = largest(all);
    float top = kMasked ? largest(best) : of_all;
    bad += sum(poison);
    for (; i < end; ++i) {
      of_all = l[i] > of_all ? l[i] : of_all;
      if (r.allows(i) && l[i] > top) top = l[i];
      bad += l[i] * 0.0f;
    }
    if (top > value) {
      value = top;
      chunk = begin;
    }
  }
  while (chunk < n && (l[chunk] != value || !r.allows(chunk))) ++chunk;
  return {chunk < n ? chunk : -1, value, of_all, bad == 0.0f};  // NaN compares unequal
}

inline Peak find_peak(const SampleRow& r, const float* l, int64_t n) {
  return r.mask ? peak_of<true>(r, l, n) : peak_of<false>(r, l, n);
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

// In the order of their logits; equal ones by id.
struct Better {
  const float* l;
  bool operator()(int32_t a, int32_t b) const { return l[a] != l[b] ? l[a] > l[b] : a < b; }
};

// Sort ids coarsely, by the distance of their logits from the peak. Then only the ids in the bucket
// that holds a border are compared, and most of a vocabulary is not.
struct Ladder {
  static constexpr int kBuckets = 1024;
  static constexpr float kPerNat = 32.0f;
  float peak, scale;
  int bucket(float logit) const {
    const float below = (peak - logit) * scale * kPerNat;
    return below < float(kBuckets - 1) ? int(below) : kBuckets - 1;
  }
};

// Keep the best tokens, as few as make up `limit` when `share(id)` counts what each brings; the
// others' p becomes zero. At least one stays.
template <typename Share>
void keep_best(SampleBuffers& b, const float* l, const Ladder& ladder, double limit,
               const Share& share) {
  float* p = b.p.data();
  const int32_t n = int32_t(b.p.size());
  double held[Ladder::kBuckets] = {};
  for (int32_t i = 0; i < n; ++i)
    if (p[i] > 0.0f) held[ladder.bucket(l[i])] += share(i);
  int border = 0;
  double before = 0;
  while (border + 1 < Ladder::kBuckets && before + held[border] < limit) before += held[border++];
  b.ids.clear();
  for (int32_t i = 0; i < n; ++i) {
    if (p[i] == 0.0f) continue;
    const int bucket = ladder.bucket(l[i]);
    if (bucket == border) b.ids.push_back(i);
    if (bucket > border) p[i] = 0.0f;
  }
  std::sort(b.ids.begin(), b.ids.end(), Better{l});
  for (int32_t id : b.ids) {
    if (before >= limit) p[id] = 0.0f;
    before += share(id);
  }
}

// Mass of p, chunk by chunk.
inline double chunk_masses(SampleBuffers& b) {
  const int64_t n = int64_t(b.p.size());
  const float* p = b.p.data();
  b.masses.clear();
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    const int64_t end = std::min(begin + kChunk, n);
    vec part = zero();
    for (int64_t i = begin; i < end; i += kLanes)
      part = add(part, end - i < kLanes ? load_tail(p + i, int(end - i)) : load(p + i));
    b.masses.push_back(double(sum(part)));
    total += b.masses.back();
  }
  return total;
}

// The token at `target` of the mass, tokens in order of their ids.
inline int32_t token_at(const SampleBuffers& b, double target) {
  int64_t n = int64_t(b.p.size()), chunk = 0, chosen = 0;
  double mass = 0;
  for (; chunk + 1 < int64_t(b.masses.size()); ++chunk) {
    if (mass + b.masses[size_t(chunk)] > target) break;
    mass += b.masses[size_t(chunk)];
  }
  for (int64_t i = chunk * kChunk; i < n; ++i) {
    if (b.p[size_t(i)] == 0.0f) continue;
    chosen = i;  // rounding may leave a little of the target: then it is the last one
    if ((mass += double(b.p[size_t(i)])) > target) break;
  }
  if (b.p[size_t(chosen)] > 0.0f) return int32_t(chosen);
  while (b.p[size_t(--n)] == 0.0f) {
  }
  return int32_t(n);
}

// p of all tokens, and its mass, chunk by chunk. What the mask forbids has none: exp has a floor
// above zero, and is left out where a whole vector is forbidden.
template <bool kMasked>
inline double weigh(SampleBuffers& b, const SampleRow& r, const float* l, float peak, float scale) {
  const int64_t n = int64_t(b.p.size());
  float* p = b.p.data();
  b.masses.clear();
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    const int64_t end = std::min(begin + kChunk, n);
    vec part = zero();
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      const uint32_t allowed = kMasked ? r.allows_lanes(i) : 1;
      vec mass = zero();
      if (allowed) mass = exp(mul(sub(load(l + i), splat(peak)), splat(scale)));
      if (kMasked) mass = select(allowed, mass, zero());
      store(p + i, mass);
      part = add(part, mass);
    }
    if (int rest = int(end - i); rest > 0) {
      store_tail(p + i, exp(mul(sub(load_tail(l + i, rest), splat(peak)), splat(scale))), rest);
      for (int64_t j = i; j < end; ++j)
        if (!r.allows(j)) p[j] = 0.0f;
      part = add(part, load_tail(p + i, rest));
    }
    b.masses.push_back(double(sum(part)));
    total += b.masses.back();
  }
  return total;
}

// A token by its logits `l`, whose allowed ones reach `peak`.
inline int32_t draw(SampleBuffers& b, const SampleRow& r, const float* l, int64_t n, float peak) {
  const float scale = std::min(1.0f / r.temperature, FLT_MAX);  // 0 * infinity would be a NaN
  b.p.resize(size_t(n));
  float* p = b.p.data();
  double total = r.mask ? weigh<true>(b, r, l, peak, scale) : weigh<false>(b, r, l, peak, scale);
  for (int64_t i = 0; i < r.banned_len; ++i) p[r.banned[i]] = 0.0f;  // exp has a floor above it
  if (r.min_p > 0.0f)
    for (int64_t i = 0; i < n; ++i) p[i] = p[i] < std::min(r.min_p, 1.0f) ? 0.0f : p[i];
  const Ladder ladder{peak, scale};
  const bool fewer = r.top_k > 0 && r.top_k < n;
  if (fewer) keep_best(b, l, ladder, double(r.top_k), [](int32_t) { return 1.0; });
  if (r.banned_len || r.min_p > 0.0f || fewer) total = chunk_masses(b);
  if (r.top_p < 1.0f) {
    const double limit = double(r.top_p) * total;
    keep_best(b, l, ladder, limit, [p](int32_t id) { return double(p[id]); });
    total = chunk_masses(b);
  }
  return token_at(b, philox(r.seed, r.position) * total);
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
  Peak best = find_peak(r, r.logits, n);
  const float of_all = best.of_all;
  *out.id = best.finite ? int32_t(best.id) : -1;
  if (!best.finite) return;
  const float* l = r.logits;
  if (r.adjusted()) {
    b.logits.assign(l, l + n);
    penalize(b, r);
    l = b.logits.data();
    best = find_peak(r, l, n);
    *out.id = int32_t(best.id);
  }
  if (best.value == -std::numeric_limits<float>::infinity()) *out.id = -1;
  if (*out.id < 0) return;
  if (r.temperature > 0.0f) *out.id = draw(b, r, l, n, best.value);
  if (r.top_logprobs >= 0) report_logprobs(r, n, of_all, b, out);
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
