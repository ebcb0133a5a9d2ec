// What all of `linear` on tiles shares: x as tiles read it, the chains of sums, the strips of
// outputs, and how reads of w are announced.
#pragma once
#include <algorithm>
#include <cstring>
#include <utility>

#include "../linear_args.h"
#include "tiled_x.h"

#if defined(C2C_TILES)
namespace c2c {

namespace tile_linear {

constexpr int kStripTiles = 2;  // of 16 outputs, at most

// The rows of w that a walk reads: in place, or in a copy.
struct Source {
  const uint8_t* at;
  int64_t row, tile, step;  // bytes from one to the next
};

template <int NA, int NB>
struct Chain {
  static_assert(NA * NB <= 4 && NB <= 2, "there are four tiles for sums");

  template <int... C>
  static inline void zero_all(std::integer_sequence<int, C...>) {
    (tiles::zero<C>(), ...);
  }
  template <int... C>
  static inline void load_all(const float* parked, std::integer_sequence<int, C...>) {
    (tiles::load<C>(parked + C * kTile * kTile, tiles::kLine), ...);
  }
  template <int... C>
  static inline void store_all(float* parked, int64_t line, std::integer_sequence<int, C...>) {
    (tiles::store<C>(parked + C * kTile * kTile, line), ...);
  }
  static inline void begin(const float* parked) {
    if (parked)
      load_all(parked, std::make_integer_sequence<int, NA * NB>());
    else
      zero_all(std::make_integer_sequence<int, NA * NB>());
  }
  // Tile [a][b] of the strip at (a * NB + b) * 256, with so many rows of x for each output.
  static inline void end(float* sums, int64_t columns = kTile) {
    store_all(sums, int64_t(sizeof(float)) * columns, std::make_integer_sequence<int, NA * NB>());
  }

  template <int A>
  static inline void row(const uint8_t* w, const Source& s) {
    constexpr int kW = 4 + A % 2;
    tiles::load<kW>(w + A * s.tile, s.row);
    tiles::multiply<A * NB, kW, 6>();
    if constexpr (NB == 2) tiles::multiply<A * NB + 1, kW, 7>();
    if constexpr (A + 1 < NA) row<A + 1>(w, s);
  }
  static inline void step(const uint8_t* w, const Source& s, const bf16* const* x, int64_t line) {
    tiles::load<6>(x[0], line);
    if constexpr (NB == 2) tiles::load<7>(x[1], line);
    row<0>(w, s);
  }
};

constexpr int64_t kSets = 64;  // of the first-level cache

// Whether rows that lie so many bytes apart share one set of it, or two at most.
inline bool share_set(int64_t bytes) { return bytes / tiles::kLine % kSets == 0; }
inline bool share_sets(int64_t bytes) { return bytes / tiles::kLine % (kSets / 2) == 0; }

// Outputs of a strip: of a gated product, one tile has their gates and the other their ups.
inline int64_t strip_outputs(const LinearArgs& a) { return a.gated ? kTile : kStripTiles * kTile; }

// Outputs [n, n + count), as many tiles as hold them, and their biases.
struct Strip {
  int64_t n, count;
  int tiles;
  int64_t hop;  // rows of w from a tile's first to the next tile's
  bool gated, biased;
  float bias[kStripTiles * kTile];

  Strip(const LinearArgs& a, int64_t from, int64_t to)
      : n(from), count(to - from), tiles(a.gated ? 2 : int((count + kTile - 1) / kTile)),
        hop(a.gated ? a.n : kTile), gated(a.gated), biased(a.bias) {
    for (int j = 0; biased && j < tiles * kTile; ++j)
      bias[j] = holds(j) ? bias_at(a, row(j)) : 0.0f;
  }

  // Row `j` of the tiles, as a row of w, and whether there is one.
  int64_t row(int j) const { return n + j / kTile * hop + j % kTile; }
  bool holds(int j) const { return (gated ? j % kTile : j) < count; }
};

// Tile [16 outputs][16 rows of x] of a strip's sums, turned, with biases.
inline void turn_tile(const Strip& strip, int tile, const float* sums, int64_t rows, float* out) {
  transpose16(out, kTile, sums, kTile, kTile, int(rows));
  if (!strip.biased) return;
  const float* bias = strip.bias + tile * kTile;
  for (int64_t i = 0; i < rows; ++i)
    for (int j = 0; j < kTile; j += kLanes)
      store(out + i * kTile + j, add(load(out + i * kTile + j), load(bias + j)));
}

// `count` outputs of a strip's tile, from n on, of rows [m, m + rows).
inline void write_rows(const LinearArgs& a, const Strip& strip, const float* turned, int64_t n,
                       int64_t count, int64_t m, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) {
    float* out = a.out + (m + i) * a.out_stride + n;
    if (count == kTile)
      std::memcpy(out, turned + i * kTile, kTile * sizeof(float));
    else
      std::memcpy(out, turned + i * kTile, size_t(count) * sizeof(float));
  }
}

inline void write_tile(const LinearArgs& a, const Strip& strip, int tile, const float* sums,
                       int64_t m, int64_t rows) {
  alignas(64) float turned[kTile * kTile];
  turn_tile(strip, tile, sums, rows, turned);
  const int64_t n = tile * kTile;
  write_rows(a, strip, turned, strip.n + n, std::min<int64_t>(kTile, strip.count - n), m, rows);
}

// Tiles of gates and ups, of the same rows of x.
inline void write_gated(const LinearArgs& a, const Strip& strip, const float* gates,
                        const float* ups, int64_t m, int64_t rows) {
  alignas(64) float gate[kTile * kTile], up[kTile * kTile];
  turn_tile(strip, 0, gates, rows, gate);
  turn_tile(strip, 1, ups, rows, up);
  for (int64_t i = 0; i < rows; ++i)
    silu_mul_row(gate + i * kTile, gate + i * kTile, up + i * kTile, kTile);
  write_rows(a, strip, gate, strip.n, strip.count, m, rows);
}

// out = sums + bias, for `count` outputs of 16 rows of x.
inline void add_biases(float* out, const float* sums, const float* bias, int64_t count) {
  for (int64_t i = 0; i < count * kTile; i += kLanes)
    store(out + i, add(load(sums + i), splat(bias[i / kTile])));
}

// As `write_gated`, in the order in which tiles of x are loaded. Outputs are the columns there, in
// pairs, so sums are not turned. After an odd number of them follow zeros.
inline void write_tiled(const LinearArgs& a, const Strip& strip, const float* gates,
                        const float* ups, int64_t m) {
  alignas(64) float act[kTile * kTile], biased[kTile * kTile];
  if (strip.biased) {
    add_biases(act, gates, strip.bias, strip.count);
    add_biases(biased, ups, strip.bias + kTile, strip.count);
    gates = act, ups = biased;
  }
  silu_mul_row(act, gates, ups, strip.count * kTile);
  std::fill(act + strip.count * kTile, act + kTile * kTile, 0.0f);
  const TiledX x = TiledX::of(a.m, a.n);
  bf16* tile = a.tiled_out + m / kTile * x.tile_size();
  for (int64_t j = 0; j < strip.count; j += 2)
    write_columns(tile, x.columns, strip.n + j, act + j * kTile, act + (j + 1) * kTile);
}

// The sums of a strip and of `columns` tiles of x, which are written piece by piece.
inline int pieces_of(const Strip& strip, int columns) {
  return strip.gated ? columns : strip.tiles * columns;
}
inline void write_piece(const LinearArgs& a, const Strip& strip, const float* sums, int columns,
                        int piece, int64_t m) {
  const int64_t row = m + piece % columns * kTile, rows = std::min<int64_t>(kTile, a.m - row);
  const float* tile = sums + piece * kTile * kTile;
  if (a.tiled_out)
    write_tiled(a, strip, tile, tile + columns * kTile * kTile, row);
  else if (strip.gated)
    write_gated(a, strip, tile, tile + columns * kTile * kTile, row, rows);
  else
    write_tile(a, strip, piece / columns, tile, row, rows);
}

// What a thread works in, kept from call to call.
struct Buffers {
  Scratch copy, parked;
  alignas(64) float sums[4 * kTile * kTile] = {};
  // Four strips, gates and ups, two tiles of x. Whole vectors are read up to their end.
  alignas(64) float few[(16 + 1) * kTile * kTile] = {};

  static Buffers& of_thread() {
    thread_local Buffers buffers;
    return buffers;
  }
};

}  // namespace tile_linear

}  // namespace c2c
#endif
