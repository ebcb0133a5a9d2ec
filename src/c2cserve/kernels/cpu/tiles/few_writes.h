// Sums of few rows of x become outputs. Strips that lie side by side are written together: each of
// their rows is a run of neighbours in `out`.
//
//             strip j          j + 1              j + 2
//   row 0     n + j            n + j + 1          n + j + 2
//       1     n + j + gap      n + j + gap + 1    ..
#pragma once
#include "strips.h"

#if defined(C2C_TILES)
namespace c2c {

namespace tile_linear {

// `gap` strips of `rows` outputs. The first has outputs n, n + gap, n + 2 gap and so on, the next one
// those behind them.
struct Spread {
  int64_t n, gap, rows;

  int64_t end() const { return n + gap * rows; }
};

// Outputs that are neighbours, from `first` on. Each has a value for all rows of x, `hop` further.
struct Run {
  int64_t first, count;
  const float* values;
  int64_t hop;

  const float* of(int64_t i) const { return values + i * hop; }
};

// The sums of a few strips, and how they are written. NB: tiles of x.
template <int NB>
class FewWriter {
 public:
  static constexpr int kStrips = 4;  // at a time, at most

  FewWriter(const LinearArgs& a, int64_t columns)
      : a_(a), columns_(columns), next_x_(TiledX::of(a.m, a.n)), sums_(Buffers::of_thread().few) {}

  // [tile of x][output][row of x] of one of the strips; a gated product has gates and ups.
  float* sums(int64_t strip, bool ups = false) const {
    return sums_ + (2 * strip + ups) * NB * kTile * kTile;
  }

  // Strips [j, j + count) of `of`, whose sums are there.
  void write(const Spread& of, int64_t j, int64_t count) const {
    for (int64_t s = 0; s < count; ++s) complete(of, j + s, s);
    for (int b = 0; b < NB; ++b) {
      const float* tile = sums(0) + b * kTile * kTile;
      if (of.gap == 1)
        write(Run{of.n, of.rows, tile, columns_}, b);
      else
        for (int64_t i = 0; i < of.rows; ++i)
          write(Run{of.n + j + i * of.gap, count, tile + i * columns_, sums(1) - sums(0)}, b);
    }
  }

 private:
  // Biases, and silu(gate) * up, which replaces the gates.
  void complete(const Spread& of, int64_t j, int64_t s) const {
    for (int b = 0; b < NB; ++b) {
      float *tile = sums(s) + b * kTile * kTile, *up = sums(s, true) + b * kTile * kTile;
      for (int64_t i = 0; a_.bias && i < of.rows; ++i) {
        add_bias(tile + i * columns_, of.n + j + i * of.gap);
        if (a_.gated) add_bias(up + i * columns_, a_.n + of.n + j + i * of.gap);
      }
      if (a_.gated) silu_mul_row(tile, tile, up, of.rows * columns_);
    }
  }
  void add_bias(float* values, int64_t n) const {
    const float bias = bias_at(a_, n);
    for (int64_t r = 0; r < columns_; ++r) values[r] += bias;
  }

  void write(const Run& run, int b) const {
    if (a_.tiled_out)
      write_tiled(run, b);
    else
      write_rows(run, b);
  }

  void write_rows(const Run& run, int b) const {
    float* out = a_.out + b * kTile * a_.out_stride + run.first;
    const int rows = int(std::min<int64_t>(kTile, a_.m - b * kTile));
    if (rows == 1 && run.hop == 1)
      std::memcpy(out, run.values, size_t(run.count) * sizeof(float));
    else if (run.count > 4)
      transpose16(out, a_.out_stride, run.values, run.hop, int(run.count), rows);
    else
      transpose4(out, a_.out_stride, run.values, run.hop, int(run.count), rows);
  }

  // As tiles of the next product's x, where outputs are columns in pairs. Runs begin at even outputs,
  // and have an even number of them.
  void write_tiled(const Run& run, int b) const {
    bf16* tile = a_.tiled_out + b * next_x_.tile_size();
    for (int64_t i = 0; i < run.count; i += 2)
      write_columns(tile, columns_, run.first + i, run.of(i), run.of(i + 1));
  }

  const LinearArgs& a_;
  const int64_t columns_;
  const TiledX next_x_;
  float* const sums_;
};

}  // namespace tile_linear

}  // namespace c2c
#endif
