// `linear` on tiles for many rows: a strip's columns at a time, from a copy in the first-level cache.
// Sums of a panel are parked between two visits.
#pragma once
#include "strips.h"

#if defined(C2C_TILES)
namespace c2c::tile_linear {

constexpr int64_t kParkedRows = 512;    // rows of x that meet a strip before it is dropped
constexpr int64_t kPanelStrips = 8;     // strips of 32 that share the columns of a block of x
constexpr int64_t kDepthSteps = 16;     // of 32 columns: 32 strips of them are 32 KiB

// ---- many rows: a copy of a strip's columns at a time -----------------------------------------

// Columns [step, step + count) of a strip, in tiles: [step][tile][16][32], zeros where w ends.
inline void copy_strip(const LinearArgs& a, const Strip& strip, int64_t step, int64_t count,
                       uint8_t* out) {
  const int64_t k = step * kStepColumns, columns = std::min(count * kStepColumns, a.k - k);
  const int64_t whole = columns / kStepColumns, rest = columns % kStepColumns;
  for (int64_t r = 0; r < strip.tiles * kTile; ++r) {
    const auto* in = static_cast<const bf16*>(a.w) + (strip.n + r) * a.w_stride + k;
    uint8_t* to = out + r * tiles::kLine;
    const int64_t hop = strip.tiles * tiles::kBytes;
    if (r >= strip.count) {
      for (int64_t s = 0; s < count; ++s) std::memset(to + s * hop, 0, tiles::kLine);
      continue;
    }
    for (int64_t s = 0; s < whole; ++s)
      std::memcpy(to + s * hop, in + s * kStepColumns, tiles::kLine);
    if (rest) {
      std::memset(to + whole * hop, 0, tiles::kLine);
      std::memcpy(to + whole * hop, in + whole * kStepColumns, size_t(rest) * sizeof(bf16));
    }
  }
}

// Steps [0, count) of a copy and tiles of x.
template <int NA, int NB>
inline void walk(const Source& s, const TiledX& x, const bf16* const (&from)[NB], int64_t count) {
  const bf16* at[NB];
  for (int b = 0; b < NB; ++b) at[b] = from[b];
  const uint8_t* w = s.at;
  const int64_t line = 4 * x.columns;
  for (int64_t k = 0; k < count; ++k, w += s.step) {
    Chain<NA, NB>::step(w, s, at, line);
    for (int b = 0; b < NB; ++b) at[b] += x.step_size();
  }
}

// A block of rows of x with a range of outputs.
class ParkedBlock {
 public:
  ParkedBlock(const LinearArgs& a, const TiledX& x, int64_t m0, int64_t m1, Buffers& buffers)
      : a_(a), x_(x), first_(m0 / kTile), tiles_((m1 - m0 + kTile - 1) / kTile), buffers_(buffers) {
    const int64_t visits = (x.steps + kDepthSteps - 1) / kDepthSteps;
    depth_ = (x.steps + visits - 1) / visits;
    copy_ = reinterpret_cast<uint8_t*>(buffers.copy.room(depth_ * 2 * tiles::kBytes / 4));
    if (visits > 1) parked_ = buffers.parked.room(kPanelStrips * pairs() * kPairSums);
  }

  void outputs(int64_t n0, int64_t n1) {
    for (int64_t n = n0; n < n1; n += kPanelStrips * kStrip)
      panel(n, std::min(n + kPanelStrips * kStrip, n1), n1);
  }

 private:
  static constexpr int64_t kStrip = 2 * kTile, kPairSums = 4 * kTile * kTile;
  int64_t pairs() const { return (tiles_ + 1) / 2; }

  void panel(int64_t n0, int64_t n1, int64_t end) {
    for (int64_t step = 0; step < x_.steps; step += depth_)
      for (int64_t n = n0; n < n1; n += kStrip)
        strip(Strip(a_, n, std::min(n + kStrip, n1)), step, (n - n0) / kStrip,
              next_of(n0, n, n1, end, step));
  }

  // What is read after strip `n` of panel [n0, n1), as far as it is whole.
  Announcer next_of(int64_t n0, int64_t n, int64_t n1, int64_t end, int64_t step) const {
    int64_t next = n + kStrip;
    if (next >= n1) {
      step += depth_;
      next = n0;
      if (step >= x_.steps) step = 0, next = n1;
    }
    if (next + kStrip > end) return {};
    const auto* w = static_cast<const bf16*>(a_.w) + next * a_.w_stride + step * kStepColumns;
    return {reinterpret_cast<const uint8_t*>(w), a_.w_stride * int64_t(sizeof(bf16)), kStrip,
            std::min(depth_, x_.steps - step)};
  }

  void strip(const Strip& strip, int64_t step, int64_t index, Announcer next) {
    const int64_t count = std::min(depth_, x_.steps - step);
    copy_strip(a_, strip, step, count, copy_);
    const int64_t pace = (next.left() + pairs() - 1) / pairs();
    for (int64_t p = 0; p < pairs(); ++p) {
      next.announce(pace);
      float* parked = parked_ ? parked_ + (index * pairs() + p) * kPairSums : nullptr;
      if (2 * p + 1 < tiles_)
        visit_of<2>(strip, step, count, p, parked);
      else
        visit_of<1>(strip, step, count, p, parked);
    }
  }

  template <int NB>
  void visit_of(const Strip& strip, int64_t step, int64_t count, int64_t pair, float* parked) {
    if (strip.tiles == 2)
      visit<2, NB>(strip, step, count, pair, parked);
    else
      visit<1, NB>(strip, step, count, pair, parked);
  }

  template <int NA, int NB>
  void visit(const Strip& strip, int64_t step, int64_t count, int64_t pair, float* parked) {
    const int64_t tile = first_ + 2 * pair;
    const bf16* from[NB];
    for (int b = 0; b < NB; ++b) from[b] = x_.tile(tile + b) + step * x_.step_size();
    Chain<NA, NB>::begin(step > 0 ? parked : nullptr);
    const Source source{copy_, tiles::kLine, tiles::kBytes, NA * tiles::kBytes};
    walk<NA, NB>(source, x_, from, count);
    const bool last = step + count == x_.steps;
    Chain<NA, NB>::end(last ? buffers_.sums : parked);
    if (last) write_strip<NA, NB>(a_, strip, buffers_.sums, tile * kTile);
  }

  const LinearArgs& a_;
  const TiledX& x_;
  const int64_t first_, tiles_;  // of x
  Buffers& buffers_;
  int64_t depth_;
  uint8_t* copy_;
  float* parked_ = nullptr;
};

}  // namespace c2c::tile_linear
#endif
