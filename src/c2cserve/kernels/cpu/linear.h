// out[M, N] = x[M, K] w[N, K]^T (+ bias), w row-major in the pool, read in place. A gated product is
// silu(gate) * up, with gates and ups of the two halves of w [2 N, K].
//
// Dot-product form: each output has one vector accumulator that walks K in order, then one fixed
// horizontal sum. Blocking only decides which outputs are worked on together, so an output's bits
// do not depend on M, on the blocking or on the threads.
//
//             K in steps of `depth` (partial accumulators are parked between two steps)
//   w  panel  [n0 ########|########|####]      NR rows meet
//   kPanel    [n1 ########|########|####]      MR rows of x: MR x NR accumulators in registers
//   x  block  [m0 ########|########|####]
//   kRows     [.. a step of the block stays in the second-level cache ..]
//
// Few rows of x take all of K at once, with rows of w that lie far apart (`spread_tile`).
#pragma once
#include <algorithm>
#include <vector>

#include "dot.h"
#include "linear_args.h"
#include "rowwise.h"
#include "threads.h"
#include "tiles/linear.h"

namespace c2c {

constexpr int kStreams = 6;            // rows of w together, at most, that few rows of x meet
constexpr int64_t kRows = 64;          // rows of x that meet a row of w before it leaves the cache
constexpr int64_t kPanel = 24;         // rows of w per visit: whole strips
constexpr int64_t kGatedPanel = 48;    // gates per visit, and as many ups: whole panels and vectors
constexpr int64_t kDepth = 1024;       // columns per visit, or more for tiles of few rows:
constexpr int64_t kTileBytes = 24576;  // a tile of x stays in the first-level cache
constexpr int64_t kAheadLines = 24;    // that are announced for few rows of x, of all streams
constexpr int kSharedSetRows = 6;      // rows of x that are few where streams of w share a cache set

#if defined(__AVX512F__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif
template <typename T>
constexpr int kLines = 2 * kPair * int(sizeof(T)) / int(kLine);  // of w in two pairs

// One step of one visit: columns [begin, end) of K, the sums continued from and left in `parked`.
struct Visit {
  int64_t n0, n1;
  int64_t begin, end;
  bool first, last;
  // Which part of the next rows of w a tile announces, and how many bytes every two steps.
  int64_t ahead, pace;
};

// A whole tile, whose outputs lie `gap` apart: the sums of many accumulators together cost less than
// one by one.
template <int MR, int NR>
C2C_INLINE inline void finish_tile(const LinearArgs& a, int64_t m, int64_t n,
                                   const vec (&acc)[MR][NR], int64_t gap = 1) {
  float sums[MR * NR], bias[NR];
  vec all[MR * NR];  // a copy: accumulators whose address is taken are not left in registers
  unrolled<MR * NR>([&](auto i) C2C_INLINE { all[i] = acc[i / NR][i % NR]; });
  sum_all<MR * NR>(sums, all);
  for (int j = 0; j < NR; ++j) bias[j] = a.bias ? bias_at(a, n + j * gap) : 0.0f;
  for (int i = 0; i < MR; ++i) {
    float* out = a.out + (m + i) * a.out_stride + n;
    if (a.bias)
      for (int j = 0; j < NR; ++j) out[j * gap] = sums[i * NR + j] + bias[j];
    else if (gap > 1)
      for (int j = 0; j < NR; ++j) out[j * gap] = sums[i * NR + j];
    else
      std::memcpy(out, sums + i * NR, sizeof(float) * NR);
  }
}

template <typename T, int MR, int NR>
C2C_INLINE inline void step(vec (&acc)[MR][NR], const Factor<T>* x, const T* const* w,
                            int64_t k) {
  if constexpr (Dot<T>::kHalves == 2) {
    Dot<T>::template add<0, MR, NR>(acc, x, w, k);
    Dot<T>::template add<1, MR, NR>(acc, x + MR * kLanes, w, k);
  } else {
    Dot<T>::template add<0, MR, NR>(acc, x, w, k);
  }
}

// MR x NR accumulators over columns [k, end), whole pairs only, over MR packed rows. Every two
// pairs the next lines of `ahead` are announced, `pace` bytes further each time.
template <typename T, int Lines, int MR, int NR>
C2C_INLINE inline int64_t walk(vec (&acc)[MR][NR], const Factor<T>* x, const T* const* w,
                               int64_t k, int64_t end, const char* const* ahead, int64_t pace) {
  for (int64_t at = 0; k + 2 * kPair <= end; at += pace) {
    for (int j = 0; j < NR; ++j)
      for (int l = 0; l < Lines; ++l) prefetch(ahead[j] + at + l * kLine);
    step<T, MR, NR>(acc, x, w, k);
    step<T, MR, NR>(acc, x + MR * kPair, w, k + kPair);
    k += 2 * kPair;
    x += 2 * MR * kPair;
  }
  if (k + kPair <= end) {
    step<T, MR, NR>(acc, x, w, k);
    k += kPair;
  }
  return k;
}

// What is left of K: fewer columns than a pair. The packed rows end in zeros.
template <typename T, int MR, int NR>
C2C_INLINE inline void walk_tail(vec (&acc)[MR][NR], const Factor<T>* x, const T* const* w,
                                 int64_t k, int rest) {
  T lanes[NR][kPair] = {};
  const T* padded[NR];
  for (int j = 0; j < NR; ++j) {
    std::memcpy(lanes[j], w[j] + k, size_t(std::min(rest, kPair)) * sizeof(T));
    padded[j] = lanes[j];
  }
  step<T, MR, NR>(acc, x, padded, 0);
}

// `x`: MR packed rows.
template <typename T, int MR, int NR>
void tile(const LinearArgs& a, const Visit& v, const Factor<T>* x, int64_t m, int64_t n,
          float* parked) {
  vec acc[MR][NR];
  const T* w[NR];
  const char* ahead[NR];
  for (int j = 0; j < NR; ++j) {
    w[j] = static_cast<const T*>(a.w) + (n + j) * a.w_stride;
    ahead[j] = reinterpret_cast<const char*>(w[j]) + v.ahead;
  }
  unrolled<MR * NR>([&](auto i) C2C_INLINE { acc[i / NR][i % NR] = zero(); });
  if (!v.first)
    unrolled<MR * NR>([&](auto i) C2C_INLINE {
      acc[i / NR][i % NR] = load(parked + i * kLanes);
    });
  x += v.begin * MR;
  constexpr int kAnnounced = MR <= 4 ? kLines<T> : 1;  // few rows: memory is what takes time
  int64_t k = walk<T, kAnnounced>(acc, x, w, v.begin, v.end, ahead, v.pace);
  if (k < v.end) walk_tail<T, MR, NR>(acc, x + (k - v.begin) * MR, w, k, int(v.end - k));
  if (v.last) return finish_tile<MR, NR>(a, m, n, acc);
  unrolled<MR * NR>([&](auto i) C2C_INLINE { store(parked + i * kLanes, acc[i / NR][i % NR]); });
}

// A few rows of x: NR streams of w that lie `gap` rows apart, so that each reads memory in sequence.
// Each is announced a fixed distance ahead, over the row's end into its next row.
template <typename T, int MR, int NR>
void spread_tile(const LinearArgs& a, const Factor<T>* x, int64_t n, int64_t gap) {
  vec acc[MR][NR];
  const T* w[NR];
  const char *here[NR], *next[NR];
  constexpr int64_t distance = kAheadLines / NR * kLine / int64_t(sizeof(T));
  const int64_t turn = a.k > distance ? (a.k - distance) / (2 * kPair) * (2 * kPair) : 0;
  for (int j = 0; j < NR; ++j) {
    w[j] = static_cast<const T*>(a.w) + (n + j * gap) * a.w_stride;
    here[j] = reinterpret_cast<const char*>(w[j] + distance);
    next[j] = reinterpret_cast<const char*>(w[j] + a.w_stride);
  }
  unrolled<MR * NR>([&](auto i) C2C_INLINE { acc[i / NR][i % NR] = zero(); });
  const int64_t line = 2 * kPair * int64_t(sizeof(T));
  int64_t k = walk<T, kLines<T>>(acc, x, w, 0, turn, here, line);
  k = walk<T, kLines<T>>(acc, x + k * MR, w, k, a.k, next, line);
  if (k < a.k) walk_tail<T, MR, NR>(acc, x + k * MR, w, k, int(a.k - k));
  finish_tile<MR, NR>(a, 0, n, acc, gap);
}

template <typename T, int NR, int MR>
inline void tile_of(int64_t rows, const LinearArgs& a, const Visit& v, const Factor<T>* x,
                    int64_t m, int64_t n, float* parked) {
  if (rows == MR) return tile<T, MR, NR>(a, v, x, m, n, parked);
  if constexpr (MR > 1) tile_of<T, NR, MR - 1>(rows, a, v, x, m, n, parked);
}

// How a block of rows of x is cut into tiles of at most `most`: as evenly as can be (8 rows are
// 4 + 4, not 6 + 2).
struct Tiling {
  int64_t begin, rows, count;
  Tiling(int64_t m0, int64_t m1, int most)
      : begin(m0), rows(m1 - m0), count((rows + most - 1) / most) {}
  int64_t at(int64_t tile) const { return begin + rows * tile / count; }
};

// Rows of x in the order in which tiles read them: for each tile, a vector of each of its rows in
// turn. Elements are in the order in which `Dot` reads w, with zeros at the end.
template <typename T>
struct Packed {
  const Factor<T>* data;
  int64_t width;  // K, rounded up to whole pairs
  const Factor<T>* row(int64_t m) const { return data + m * width; }
};

// Columns [k, end) of a tile, whole pairs.
template <typename T>
inline void pack_tile(Factor<T>* out, const LinearArgs& a, int64_t m0, int64_t m1, int64_t k,
                      int64_t end) {
  const int64_t rows = m1 - m0;
  for (out += k * rows; k < end; k += kPair, out += rows * kPair)
    for (int64_t i = 0; i < rows; ++i) {
      const float* in = a.x + (m0 + i) * a.x_stride + k;
      float lanes[kPair] = {};
      if (k + kPair > a.k) {
        std::memcpy(lanes, in, size_t(a.k - k) * sizeof(float));
        in = lanes;
      }
      Dot<T>::pack(out, in, i, rows);
    }
}

// A tile of x, in the first-level cache by now, with a panel of w, strip by strip.
template <typename T>
void tile_with_panel(const LinearArgs& a, Visit v, const Packed<T>& x, const Tiling& t,
                     int64_t i, float* parked) {
  constexpr int kMr = Dot<T>::kMr, kNr = Dot<T>::kNr;
  static_assert(kPanel % kNr == 0, "panels are made of whole tiles");
  const int64_t m = t.at(i), rows = t.at(i + 1) - m;
  if (!v.first || !v.last) parked += (m - t.begin) * kPanel * kLanes;
  // With one tile the next strip is needed next; with more, this strip's next visit is far enough
  // away for the memory to keep up.
  int64_t next = v.last ? kPanel * a.w_stride : v.end;
  if (t.count == 1) next = kNr * a.w_stride + v.begin;
  v.ahead = (next + (v.end - v.begin) * i / t.count) * int64_t(sizeof(T));
  v.pace = 2 * kPair * int64_t(sizeof(T)) / t.count;
  const int64_t slot = v.first && v.last ? 0 : rows * kLanes;  // per row of w
  int64_t n = v.n0;
  for (; n + kNr <= v.n1; n += kNr, parked += slot * kNr)
    tile_of<T, kNr, kMr>(rows, a, v, x.row(m), m, n, parked);
  for (; n < v.n1; ++n, parked += slot) tile_of<T, 1, kMr>(rows, a, v, x.row(m), m, n, parked);
}

// Columns [n0, n1) of a block of rows, in steps of `depth` columns of K.
template <typename T>
void panel(const LinearArgs& a, const Packed<T>& x, const Tiling& tiles, int64_t n0, int64_t n1,
           int64_t depth, float* parked) {
  for (int64_t k = 0; k < a.k; k += depth) {
    const Visit v{n0, n1, k, std::min(k + depth, a.k), k == 0, k + depth >= a.k, 0, 0};
    for (int64_t i = 0; i < tiles.count; ++i) tile_with_panel<T>(a, v, x, tiles, i, parked);
  }
}

// The product with rows [from, from + count) of w, to `out`.
template <typename T>
inline LinearArgs part_of(const LinearArgs& a, int64_t from, int64_t count, float* out,
                          int64_t out_stride) {
  LinearArgs part = a;
  part.out = out, part.out_stride = out_stride, part.n = count, part.gated = false;
  part.w = static_cast<const T*>(a.w) + from * a.w_stride;
  const int64_t item = a.bias_type == Dtype::f32 ? 4 : 2;
  if (a.bias) part.bias = static_cast<const uint8_t*>(a.bias) + from * item;
  return part;
}

// As `panel`, for kGatedPanel columns at most: gates and ups meet while they lie in a cache.
template <typename T>
void gated_panel(const LinearArgs& a, const Packed<T>& x, const Tiling& tiles, int64_t n0,
                 int64_t n1, int64_t depth, float* parked) {
  static_assert(kGatedPanel % kLanes == 0, "they are combined as whole vectors");
  float halves[2][kRows * kGatedPanel];
  const Tiling here(0, tiles.rows, Dot<T>::kMr);
  const Packed<T> rows{x.row(tiles.begin), x.width};
  const int64_t count = n1 - n0;
  for (int half = 0; half < 2; ++half) {
    float* out = halves[half];
    for (int64_t i = 0; i < here.rows; ++i)
      std::fill_n(out + i * kGatedPanel + count, kGatedPanel - count, 0.0f);
    const LinearArgs part = part_of<T>(a, half * a.n + n0, count, out, kGatedPanel);
    for (int64_t n = 0; n < count; n += kPanel)
      panel<T>(part, rows, here, n, std::min(n + kPanel, count), depth, parked);
  }
  for (int64_t i = 0; i < here.rows; ++i) {
    float* act = halves[0] + i * kGatedPanel;
    silu_mul_row(act, act, halves[1] + i * kGatedPanel, kGatedPanel);
    std::memcpy(a.out + (tiles.begin + i) * a.out_stride + n0, act, size_t(count) * sizeof(float));
  }
}

// Columns [n0, n1) of the output.
template <typename T>
void linear_columns(const LinearArgs& a, const Packed<T>& x, int64_t n0, int64_t n1) {
  const int64_t block = std::min(a.m, kRows), tile_rows = std::min<int64_t>(a.m, Dot<T>::kMr);
  const int64_t fits = kTileBytes / int64_t(sizeof(Factor<T>)) / tile_rows;
  const int64_t depth = std::max(kDepth, fits / kDepth * kDepth);
  std::vector<float> parked(depth < a.k ? size_t(block * kPanel * kLanes) : 0);
  for (int64_t m = 0; m < a.m; m += block) {
    const Tiling tiles(m, std::min(m + block, a.m), Dot<T>::kMr);
    const auto columns = a.gated ? gated_panel<T> : panel<T>;
    const int64_t width = a.gated ? kGatedPanel : kPanel;
    for (int64_t n = n0; n < n1; n += width)
      columns(a, x, tiles, n, std::min(n + width, n1), depth, parked.data());
  }
}

template <typename T, int MR = Dot<T>::kFewRows>
void spread_columns(const LinearArgs& a, const Factor<T>* x, int64_t n0, int64_t n1) {
  if constexpr (MR > 1)
    if (a.m < MR) return spread_columns<T, MR - 1>(a, x, n0, n1);
  constexpr int kNr = std::min(kStreams, (kRegisters - 1) / (MR + 1));
  const int64_t gap = (n1 - n0) / kNr;
  for (int64_t n = n0; n < n0 + gap; ++n) spread_tile<T, MR, kNr>(a, x, n, gap);
  for (int64_t n = n0 + gap * kNr; n < n1; ++n) spread_tile<T, MR, 1>(a, x, n, 1);
}

// Gates, then ups, of few rows of x.
template <typename T>
void gated_spread_columns(const LinearArgs& a, const Factor<T>* x, int64_t n0, int64_t n1) {
  thread_local std::vector<float> halves;
  const int64_t count = n1 - n0;
  halves.resize(size_t(2 * a.m * count));
  float* ups = halves.data() + a.m * count;
  spread_columns<T>(part_of<T>(a, n0, count, halves.data(), count), x, 0, count);
  spread_columns<T>(part_of<T>(a, a.n + n0, count, ups, count), x, 0, count);
  for (int64_t m = 0; m < a.m; ++m)
    silu_mul_row(a.out + m * a.out_stride + n0, halves.data() + m * count, ups + m * count, count);
}

// Whether there are few rows of x. Where streams of w share a set of the first-level cache, it has no
// room for as many.
template <typename T>
bool is_few(const LinearArgs& a) {
  const bool shared = share_set(a.w_stride * int64_t(sizeof(T)));
  return a.m <= std::min(Dot<T>::kFewRows, shared ? kSharedSetRows : Dot<T>::kFewRows);
}

template <typename T>
Packed<T> pack(ThreadPool& pool, const LinearArgs& a) {
  const int64_t width = (a.k + kPair - 1) / kPair * kPair;
  constexpr int64_t kSize = sizeof(Factor<T>), kFloat = sizeof(float);
  auto* data = reinterpret_cast<Factor<T>*>(pool.scratch((a.m * width * kSize + 3) / kFloat));
  const int most = is_few<T>(a) ? Dot<T>::kFewRows : Dot<T>::kMr;  // few: one tile
  // Shared out by columns: few rows have many of them.
  const int64_t pairs = width / kPair;
  pool.run(a.m * a.k < ThreadPool::kWorthHelpers ? 1 : pool.size(), [&](int part, int all) {
    const int64_t k = pairs * part / all * kPair, end = pairs * (part + 1) / all * kPair;
    for (int64_t m = 0; m < a.m; m += kRows) {
      const Tiling t(m, std::min(m + kRows, a.m), most);
      for (int64_t i = 0; i < t.count; ++i)
        pack_tile<T>(data + t.at(i) * width, a, t.at(i), t.at(i + 1), k, end);
    }
  });
  return {data, width};
}

template <typename T>
void linear_typed(ThreadPool& pool, const LinearArgs& a) {
  // Waking a helper costs a few microseconds: worth it from about 100k multiply-adds on. Much work
  // comes in more parts than threads, so that one which is held up does not hold up the rest.
  const int64_t work = a.m * a.n * a.k * (a.gated ? 2 : 1), threads = pool.size();
  const int64_t fine = std::clamp<int64_t>(work / threads / 1'000'000, 1, 4);
  const int64_t most = std::min<int64_t>(a.n, ThreadPool::kPartsMax);
  const int64_t parts = work < 100'000 ? 1 : std::min(threads * fine, most);
  const Packed<T> x = pack<T>(pool, a);
  pool.run(int(parts), [&](int part, int all) {
    int64_t per = ((a.n + all - 1) / all + 7) / 8 * 8;  // halves of the output's cache lines
    int64_t n0 = per * part, n1 = std::min(n0 + per, a.n);
    if (n0 >= n1) return;
    if (is_few<T>(a) && a.gated)
      gated_spread_columns<T>(a, x.data, n0, n1);
    else if (is_few<T>(a))
      spread_columns<T>(a, x.data, n0, n1);
    else
      linear_columns<T>(a, x, n0, n1);
  });
}

inline void linear(ThreadPool& pool, const LinearArgs& a, Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return linear_typed<float>(pool, a);
    case Dtype::f16: return linear_typed<f16>(pool, a);
    case Dtype::bf16:
#if defined(C2C_TILES)
      return linear_tiles(pool, a);
#else
      return linear_typed<bf16>(pool, a);
#endif
  }
}

// `down` of the rows that `gated` gives. Those need not be written to its `out`.
inline void feed_forward(ThreadPool& pool, const LinearArgs& gated, const LinearArgs& down,
                         Dtype dtype) {
#if defined(C2C_TILES)
  if (dtype == Dtype::bf16) return feed_forward_tiles(pool, gated, down);
#endif
  linear(pool, gated, dtype);
  linear(pool, down, dtype);
}

// `linear` without rounding x, on every level: for few outputs that decide much.
inline void linear_exact(ThreadPool& pool, const LinearArgs& a, Dtype dtype) {
#if defined(C2C_ROUNDS)
  if (dtype == Dtype::bf16) return linear_typed<exact_bf16>(pool, a);
#endif
  linear(pool, a, dtype);
}

}  // namespace c2c
