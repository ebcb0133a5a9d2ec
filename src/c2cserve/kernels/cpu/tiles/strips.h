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

// Outputs [n, end).
struct Outputs {
  int64_t n, end;
};

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
