// Rows of x as tiles of B read them: in bf16, in pairs of columns. An operator that writes them so
// spares the next product a pass over float32 values. The bits are those of `linear`'s own packing.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "../dot.h"
#include "../rowwise.h"
#include "../threads.h"
#include "registers.h"
#include "transpose.h"

#if defined(C2C_TILES)
namespace c2c::tile_linear {

constexpr int kTile = 16;
constexpr int kStepColumns = tiles::kColumns;
constexpr int64_t kFewRows = 2 * kTile;  // of x at most, where w is read at the speed of memory

// x in the order in which tiles are loaded: [16 rows][step][pair][row][2], zeros behind the columns.
struct TiledX {
  const bf16* data;
  int64_t steps;    // of 32 columns
  int64_t columns;  // rows of x in a tile: fewer than 16 if there are no more

  // That of [m, k], without its data.
  static TiledX of(int64_t m, int64_t k) {
    return {nullptr, (k + kStepColumns - 1) / kStepColumns, std::min<int64_t>(m, kTile)};
  }
  int64_t step_size() const { return kStepColumns * columns; }
  int64_t tile_size() const { return steps * step_size(); }
  const bf16* tile(int64_t t) const { return data + t * tile_size(); }
};

// Values of [m, k] as tiles.
inline int64_t tiled_size(int64_t m, int64_t k) {
  return (m + kTile - 1) / kTile * TiledX::of(m, k).tile_size();
}

// 32 columns of a tile, from column k of `width` on. `values(row, column, count)` gives a vector of
// a row, the first `count` lanes of it. Rows and columns that are not there are zeros.
template <typename Values>
inline void pack_step(bf16* out, int columns, int64_t rows, int64_t k, int64_t width,
                      const Values& values) {
  alignas(64) uint32_t lines[kTile * kTile];
  const bool whole = k + kStepColumns <= width;
  for (int64_t r = 0; r < columns; ++r) {
    auto* line = reinterpret_cast<bf16*>(lines + r * kTile);
    float padded[kStepColumns] = {};
    for (int64_t c = 0; r < rows && !whole && k + c < width; c += kLanes) {
      const int count = int(std::min<int64_t>(kLanes, width - k - c));
      store_tail(padded + c, values(r, k + c, count), count);
    }
    for (int c = 0; c < kStepColumns; c += 2 * kLanes)
      if (whole && r < rows)
        round_pair(line + c, values(r, k + c, kLanes), values(r, k + c + kLanes, kLanes));
      else
        round_pair(line + c, load(padded + c), load(padded + c + kLanes));
  }
  transpose16(reinterpret_cast<uint32_t*>(out), columns, lines, kTile, columns, kTile);
}

inline vec some(const float* in, int count) {
  return count == kLanes ? load(in) : load_tail(in, count);
}

// Rows `row(0)`, ..., `row(m - 1)` of `width` values, as tiles.
template <typename Row>
inline void pack_rows(ThreadPool& pool, bf16* out, int64_t m, int64_t width, const Row& row) {
  const TiledX x = TiledX::of(m, width);
  const int64_t count = (m + kTile - 1) / kTile * x.steps;
  pool.run(m * width < ThreadPool::kWorthHelpers ? 1 : pool.size(), [&](int part, int all) {
    for (int64_t i = count * part / all; i < count * (part + 1) / all; ++i) {
      const int64_t first = i / x.steps * kTile;
      const auto values = [&](int64_t r, int64_t c, int lanes) {
        return some(row(first + r) + c, lanes);
      };
      pack_step(out + i * x.step_size(), int(x.columns), std::min<int64_t>(kTile, m - first),
                i % x.steps * kStepColumns, width, values);
    }
  });
}

// Columns n and n + 1 of a tile, of which n is even: so many values as it has rows, of the 16 that are
// given.
inline void write_columns(bf16* tile, int64_t columns, int64_t n, const vec* first,
                          const vec* second) {
  bf16* out = tile + n * columns;
  if (columns == kTile) return store_pairs(out, first, second);
  alignas(64) bf16 pairs[2 * kTile];
  store_pairs(pairs, first, second);
  std::memcpy(out, pairs, size_t(2 * columns) * sizeof(bf16));
}
inline void write_columns(bf16* tile, int64_t columns, int64_t n, const float* first,
                          const float* second) {
  vec low[kTile / kLanes], high[kTile / kLanes];
  for (int p = 0; p < kTile / kLanes; ++p) {
    low[p] = load(first + p * kLanes);
    high[p] = load(second + p * kLanes);
  }
  write_columns(tile, columns, n, low, high);
}

// Rows, normalized: what `pack_step` takes of 16 of them.
struct NormalizedRows {
  const float *first, *scales, *weight;
  int64_t width;

  vec operator()(int64_t r, int64_t c, int lanes) const {
    return mul(mul(some(first + r * width + c, lanes), splat(scales[r])), some(weight + c, lanes));
  }
};

// rows += x if there is any. Returns 1 / rms(rows).
inline float add_and_scale(float* row, const float* x, float eps, int64_t width) {
  if (x) add_row(row, x, width);
  return rms_scale(row, eps, width);
}

// norm(rows), as tiles. With `x`, rows += x before. A thread has the same rows in each call, so they
// are in its cache, and packs them; or their columns are shared out.
inline void rms_norm_tiles(ThreadPool& pool, bf16* out, const float* x, float* rows,
                           const float* weight, float eps, int64_t tokens, int64_t width) {
  const TiledX shape = TiledX::of(tokens, width);
  std::vector<float> scales(static_cast<size_t>(tokens));
  pool.rows(tokens, 2 * width, [&](int64_t t) {
    scales[size_t(t)] = add_and_scale(rows + t * width, x ? x + t * width : x, eps, width);
  });
  const int64_t count = (tokens + kTile - 1) / kTile * shape.steps;
  const int parts = tokens * width < ThreadPool::kWorthHelpers ? 1 : pool.size();
  pool.run(parts, [&](int part, int all) {
    for (int64_t i = count * part / all; i < count * (part + 1) / all; ++i) {
      const int64_t t = i / shape.steps * kTile;
      pack_step(out + i * shape.step_size(), int(shape.columns),
                std::min<int64_t>(kTile, tokens - t), i % shape.steps * kStepColumns, width,
                NormalizedRows{rows + t * width, scales.data() + t, weight, width});
    }
  });
}

// Where columns of one of `rows` rows lie among tiles. Columns are even, as heads' sizes are.
class TiledRow {
 public:
  TiledRow(bf16* data, int64_t rows, int64_t width, int64_t row)
      : TiledRow(data, TiledX::of(rows, width), row) {}

  bf16* pair(int64_t column) const { return at_ + column * columns_; }

  // `count` values from a column on, rounded.
  void write(int64_t column, const float* values, int64_t count) const {
    for (int64_t c = 0; c < count; c += kStepColumns) {
      const int64_t here = std::min<int64_t>(kStepColumns, count - c);
      alignas(64) float line[kStepColumns] = {};
      alignas(64) bf16 rounded[kStepColumns];
      std::memcpy(line, values + c, size_t(here) * sizeof(float));
      for (int i = 0; i < kStepColumns; i += 2 * kLanes)
        round_pair(rounded + i, load(line + i), load(line + i + kLanes));
      for (int64_t i = 0; i < here; i += 2)
        std::memcpy(pair(column + c + i), rounded + i, 2 * sizeof(bf16));
    }
  }

 private:
  TiledRow(bf16* data, const TiledX& x, int64_t row)
      : at_(data + row / kTile * x.tile_size() + row % kTile * 2), columns_(x.columns) {}

  bf16* at_;
  int64_t columns_;
};

// Zeros behind the columns of rows that are written one by one, or value by value.
inline void clear_ends(bf16* data, int64_t tokens, int64_t width) {
  const TiledX shape = TiledX::of(tokens, width);
  const int64_t held = width / 2 * 2 * shape.columns, size = shape.tile_size();
  for (int64_t t = 0; held < size && t < (tokens + kTile - 1) / kTile; ++t)
    std::memset(data + t * size + held, 0, size_t(size - held) * sizeof(bf16));
}

}  // namespace c2c::tile_linear
#endif
