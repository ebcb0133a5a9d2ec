// Copies of strips of w as whole tiles, made little by little while others are multiplied.
#pragma once
#include "strips.h"

#if defined(C2C_TILES)
namespace c2c::tile_linear {

// Columns [step, step + steps) of a strip of w, [step][tile][16][32], copied in the order of
// memory. What lies beyond w is zero. Without a place for the copy, the lines are announced to the
// second-level cache instead.
class StripCopy {
 public:
  StripCopy() = default;
  StripCopy(const LinearArgs& a, const Strip& strip, int64_t step, int64_t steps, uint8_t* out)
      : out_(out), hop_(strip.tiles * tiles::kBytes),
        row_bytes_(a.w_stride * int64_t(sizeof(bf16))), tile_bytes_(strip.hop * row_bytes_),
        tile_rows_(std::min<int64_t>(kTile, strip.count)) {
    const int64_t k = step * kStepColumns, columns = std::min(steps * kStepColumns, a.k - k);
    const auto* w = static_cast<const bf16*>(a.w) + k;
    at_ = tile_at_ = reinterpret_cast<const uint8_t*>(w + strip.n * a.w_stride);
    lines_ = columns / kStepColumns;
    if (lines_ > 0) rows_ = strip.gated ? 2 * strip.count : strip.count;
    const auto rest = size_t(columns % kStepColumns) * sizeof(bf16);
    for (int r = 0; out && r < strip.tiles * kTile; ++r) {
      uint8_t* to = out + r * tiles::kLine;
      for (int64_t s = 0; !strip.holds(r) && s < steps; ++s)
        std::memset(to + s * hop_, 0, tiles::kLine);
      if (rest == 0 || !strip.holds(r)) continue;
      std::memset(to + lines_ * hop_, 0, tiles::kLine);
      std::memcpy(to + lines_ * hop_, w + strip.row(r) * a.w_stride + lines_ * kStepColumns, rest);
    }
  }

  // `count` lines, or those that are left.
  void copy(int64_t count) {
    while (count > 0 && rows_ > 0) {
      const int64_t run = std::min(count, lines_ - line_);
      const uint8_t* from = at_ + line_ * tiles::kLine;
      if (out_)
        copy_lines(out_ + line_ * hop_, from, run);
      else
        for (int64_t l = 0; l < run; ++l) prefetch_early(from + l * tiles::kLine);
      count -= run;
      line_ += run;
      if (line_ == lines_) next_row();
    }
  }
  int64_t left() const { return rows_ * lines_ - line_; }

 private:
  static constexpr int64_t kEarlyRows = 4;  // how far reads are announced

  void copy_lines(uint8_t* to, const uint8_t* from, int64_t count) const {
    for (int64_t l = 0; l < count; ++l, from += tiles::kLine, to += hop_) {
      prefetch_early(from + kEarlyRows * row_bytes_);
      std::memcpy(to, from, tiles::kLine);
    }
  }

  void next_row() {
    line_ = 0;
    --rows_;
    at_ += row_bytes_;
    if (out_) out_ += tiles::kLine;
    if (++row_ < tile_rows_) return;
    if (out_) out_ += (kTile - row_) * tiles::kLine;
    row_ = 0;
    at_ = tile_at_ += tile_bytes_;
  }

  uint8_t* out_ = nullptr;
  int64_t hop_ = 0, row_bytes_ = 0, tile_bytes_ = 0, tile_rows_ = 0;
  int64_t rows_ = 0, lines_ = 0, line_ = 0, row_ = 0;
  const uint8_t *at_ = nullptr, *tile_at_ = nullptr;  // a row, and its tile's first
};

}  // namespace c2c::tile_linear
#endif
