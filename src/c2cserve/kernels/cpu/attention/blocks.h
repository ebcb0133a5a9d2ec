// Attention of up to 16 rows by blocks of 16 keys, in float32.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "args.h"

namespace c2c {

constexpr int kTogether = 4;    // of them, rows that share the loads of a block

// The part of a block a row sees, and its keys' weights.
struct Share {
  RowState* row;
  int from, to;
  float shrink;  // of what the row has gathered so far
  float weights[kBlock];

  bool sees_as(const Share& other) const { return from == other.from && to == other.to; }
};

// body(0) for an even i, body(1) for an odd one: as constants.
template <typename Body>
C2C_INLINE inline void by_parity(int64_t i, const Body& body) {
  if (i % 2 == 0)
    body(std::integral_constant<int, 0>());
  else
    body(std::integral_constant<int, 1>());
}

// Keys of dimension d, from key `from` on; `Half` is d % 2.
template <int Half, typename T>
inline vec keys_at(const T* k, int64_t d, int from) {
  if constexpr (std::is_same_v<T, bf16>)
    return load_half<Half>(k + (d - Half) * kBlock + 2 * from);
  else
    return load(k + d * kBlock + from);
}

// Values of key j, from dimension d on; `Half` is j % 2.
template <int Half, typename T>
inline vec values_at(const T* v, int64_t dim, int64_t j, int64_t d) {
  if constexpr (std::is_same_v<T, bf16>)
    return load_half<Half>(v + (j - Half) * dim + 2 * d);
  else
    return load(v + j * dim + d);
}

// The same of the last `rest` dimensions, fewer than a vector has.
template <typename T>
inline vec last_values_at(const T* v, int64_t dim, int64_t j, int64_t d, int rest) {
  T lanes[kLanes] = {};
  for (int i = 0; i < rest; ++i)
    if constexpr (std::is_same_v<T, bf16>)
      lanes[i] = v[j / 2 * 2 * dim + 2 * (d + i) + j % 2];
    else
      lanes[i] = v[j * dim + d + i];
  return load(lanes);
}

// Scores of R rows against the 16 keys of a block, left in `weights`. `dim` is even.
template <typename T, int R>
inline void score(Share* shares, const T* k, int64_t dim) {
  constexpr int kParts = kBlock / kLanes;
  vec acc[R][kParts];
  const float* q[R];
  for (int r = 0; r < R; ++r) {
    q[r] = shares[r].row->q;
    for (int p = 0; p < kParts; ++p) acc[r][p] = zero();
  }
  const auto add = [&](auto half, int64_t d) C2C_INLINE {
    vec keys[kParts];
    for (int p = 0; p < kParts; ++p) keys[p] = held(keys_at<half()>(k, d, p * kLanes));
    for (int r = 0; r < R; ++r) {
      const vec query = splat(q[r][d]);
      for (int p = 0; p < kParts; ++p) acc[r][p] = fma(query, keys[p], acc[r][p]);
    }
  };
  for (int64_t d = 0; d < dim; d += 2) {
    add(std::integral_constant<int, 0>(), d);
    add(std::integral_constant<int, 1>(), d + 1);
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < kParts; ++p) store(shares[r].weights + p * kLanes, acc[r][p]);
}

// Scores into weights, relative to the row's peak so far.
inline void weigh(Share& s, float scale) {
  RowState& row = *s.row;
  const float hidden = -std::numeric_limits<float>::infinity();
  for (int j = 0; j < s.from; ++j) s.weights[j] = hidden;
  for (int j = s.to; j < kBlock; ++j) s.weights[j] = hidden;
  vec best = splat(row.peak);
  for (int p = 0; p < kBlock; p += kLanes) {
    vec scaled = mul(load(s.weights + p), splat(scale));
    store(s.weights + p, scaled);
    best = max(best, scaled);
  }
  const float peak = largest(best);
  for (int p = 0; p < kBlock; p += kLanes)
    store(s.weights + p, exp(sub(load(s.weights + p), splat(peak))));
  for (int j = 0; j < s.from; ++j) s.weights[j] = 0.0f;  // exp has a floor above it
  for (int j = s.to; j < kBlock; ++j) s.weights[j] = 0.0f;
  if (row.total == 0.0f)
    s.shrink = 0.0f;
  else
    s.shrink = row.peak == peak ? 1.0f : exp1(row.peak - peak);
  vec total = load(s.weights);
  for (int p = kLanes; p < kBlock; p += kLanes) total = add(total, load(s.weights + p));
  row.total = row.total * s.shrink + sum(total);
  row.peak = peak;
}

// D vectors of R rows' sums, from dimension `d` on; the rows see the same keys.
template <typename T, int R, int D>
inline void gather(const Share* shares, const T* v, int64_t dim, int64_t d) {
  vec acc[R][D];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < D; ++i)
      acc[r][i] = mul(load(shares[r].row->acc + d + i * kLanes), splat(shares[r].shrink));
  for (int j = shares[0].from; j < shares[0].to; ++j)
    by_parity(j, [&](auto half) C2C_INLINE {
      vec value[D];
      for (int i = 0; i < D; ++i) value[i] = held(values_at<half()>(v, dim, j, d + i * kLanes));
      for (int r = 0; r < R; ++r) {
        vec weight = splat(shares[r].weights[j]);
        for (int i = 0; i < D; ++i) acc[r][i] = fma(weight, value[i], acc[r][i]);
      }
    });
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < D; ++i) store(shares[r].row->acc + d + i * kLanes, acc[r][i]);
}

template <typename T, int R>
inline void gather_rows(const Share* shares, const T* v, int64_t dim) {
  int64_t d = 0;
  constexpr int kWide = 8 / R;  // eight sums at once
  for (; d + kWide * kLanes <= dim; d += kWide * kLanes) gather<T, R, kWide>(shares, v, dim, d);
  for (; d + kLanes <= dim; d += kLanes) gather<T, R, 1>(shares, v, dim, d);
  const int rest = int(dim - d);
  if (rest == 0) return;
  for (int r = 0; r < R; ++r) {
    vec acc = mul(load_tail(shares[r].row->acc + d, rest), splat(shares[r].shrink));
    for (int j = shares[r].from; j < shares[r].to; ++j)
      acc = fma(splat(shares[r].weights[j]), last_values_at(v, dim, j, d, rest), acc);
    store_tail(shares[r].row->acc + d, acc, rest);
  }
}

inline void announce(const uint8_t* plane, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) prefetch(plane + i);
}

// One block, for rows that look at one kv head; `ahead` is the block read next, or the same.
template <typename T>
void attend_block(const AttentionArgs& a, Share* shares, int count, int64_t block, int64_t ahead,
                  int64_t head) {
  const int64_t dim = a.kv.head_dim, bytes = a.kv.plane_bytes();
  const T* k = reinterpret_cast<const T*>(a.kv.plane(block, 0, head));
  const T* v = reinterpret_cast<const T*>(a.kv.plane(block, 1, head));
  if (ahead != block) announce(a.kv.plane(ahead, 0, head), bytes);
  int r = 0;
  for (; r + kTogether <= count; r += kTogether) score<T, kTogether>(shares + r, k, dim);
  for (; r + 2 <= count; r += 2) score<T, 2>(shares + r, k, dim);
  for (; r < count; ++r) score<T, 1>(shares + r, k, dim);
  for (r = 0; r < count; ++r) weigh(shares[r], a.scale);
  if (ahead != block) announce(a.kv.plane(ahead, 1, head), bytes);
  for (r = 0; r < count;) {
    int same = 1;
    while (same < kTogether && r + same < count && shares[r + same].sees_as(shares[r])) ++same;
    if (same == kTogether) {
      gather_rows<T, kTogether>(shares + r, v, dim);
    } else if (same > 1) {
      same = 2;
      gather_rows<T, 2>(shares + r, v, dim);
    } else {
      gather_rows<T, 1>(shares + r, v, dim);
    }
    r += same;
  }
}

}  // namespace c2c
