// Sums of many rows of x become outputs a piece at a time, while the next tiles are multiplied. A
// piece is short: a processor looks ahead over a few hundred instructions, and should find the next
// products among them.
#pragma once
#include "strips.h"

#if defined(C2C_TILES)
namespace c2c::tile_linear {

class ManyWriter {
 public:
  explicit ManyWriter(const LinearArgs& a)
      : a_(a), next_x_(TiledX::of(a.m, a.n)), width_(a.tiled_out ? 2 : kTile), strip_(a, 0, 0) {}

  // Those of a strip and of `columns` tiles of x, from row `m` on: [tile of w][tile of x][16][16].
  void take(const Strip& strip, float* sums, int64_t m, int columns) {
    strip_ = strip, sums_ = sums, m_ = m, columns_ = columns, column_ = 0, n_ = 0;
  }

  // Lines of so many rows, of the sums that will be taken next. Rows of tiles are few lines.
  void announce(const Strip& strip, int64_t row, int64_t end) const {
    if (a_.tiled_out) return;
    for (; row < std::min(end, a_.m); ++row)
      for (int64_t n = 0; n < strip.count; n += kTile)
        prefetch_to_write(a_.out + row * a_.out_stride + strip.n + n);
  }

  // Steps from one piece to the next, of so many in which all should be written.
  int64_t pace(int64_t steps) const {
    const int64_t pieces = columns_ * ((strip_.count + width_ - 1) / width_);
    return std::max<int64_t>(steps / std::max<int64_t>(pieces, 1), 1);
  }

  void write_one() {
    if (column_ == columns_) return;
    if (a_.tiled_out)
      write_pair();
    else
      write_rows();
    if ((n_ += width_) < strip_.count) return;
    n_ = 0;
    ++column_;
  }
  void finish() {
    while (column_ < columns_) write_one();
  }

 private:
  float* tile(int64_t of_w) const { return sums_ + (of_w * columns_ + column_) * kTile * kTile; }

  // A tile of outputs, turned.
  void write_rows() const {
    float* sums = tile(n_ / kTile);
    for (int64_t i = 0; strip_.gated && i < kTile * kTile; i += kLanes)
      store(sums + i, gated(i / kTile, i % kTile));
    for (int64_t i = 0; strip_.biased && !strip_.gated && i < kTile * kTile; i += kLanes)
      store(sums + i, add(load(sums + i), splat(strip_.bias[n_ + i / kTile])));
    const int64_t row = m_ + column_ * kTile;
    transpose16(a_.out + row * a_.out_stride + strip_.n + n_, a_.out_stride, sums, kTile,
                int(std::min<int64_t>(kTile, strip_.count - n_)),
                int(std::min<int64_t>(kTile, a_.m - row)));
  }

  // Two outputs of a gated product, in the order in which tiles of x are loaded: columns there are in
  // pairs, so nothing is turned. After an odd number of them follow zeros.
  void write_pair() const {
    vec act[2][kTile / kLanes];
    for (int64_t j = 0; j < 2; ++j)
      for (int p = 0; p < kTile / kLanes; ++p)
        act[j][p] = n_ + j < strip_.count ? gated(n_ + j, p * kLanes) : zero();
    bf16* out = a_.tiled_out + (m_ / kTile + column_) * next_x_.tile_size();
    write_columns(out, next_x_.columns, strip_.n + n_, act[0], act[1]);
  }
  // silu(gate) * up of an output, for rows from one on.
  vec gated(int64_t n, int64_t row) const {
    vec gate = load(tile(0) + n * kTile + row), up = load(tile(1) + n * kTile + row);
    if (strip_.biased) {
      gate = add(gate, splat(strip_.bias[n]));
      up = add(up, splat(strip_.bias[kTile + n]));
    }
    return silu_mul(gate, up);
  }

  const LinearArgs& a_;
  const TiledX next_x_;
  const int64_t width_;  // outputs of a piece
  Strip strip_;
  float* sums_ = nullptr;
  int64_t m_ = 0, columns_ = 0;
  int64_t column_ = 0, n_ = 0;  // of the next piece
};

}  // namespace c2c::tile_linear
#endif
