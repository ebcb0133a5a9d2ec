// The products of a chunk of attention on AMX tiles. Keys and values are laid out in pairs, once for
// all rows of a task.
//
//   scores   A = q [16 rows][32 dimensions]    B = k [16 pairs of dimensions][16 keys]
//   sums     A = weights [16 rows][32 keys]    B = v [16 pairs of keys][16 dimensions]
#pragma once
#include "../chunks.h"

namespace c2c::chunks {

class Units {
 public:
  using Session = tiles::Session;

  void take(const Chunk& chunk) {
    const int64_t steps = (chunk.dim + kWidth - 1) / kWidth;
    for (int block = 0; block < kBlocks; ++block)
      if (chunk.holds(block)) take_keys(chunk, block, steps);
    for (int key = 0; key < kKeys; key += 2) take_values(chunk, key);
  }

  // Scores of blocks that are not there are of no use, and are not looked at.
  void score(const Chunk& chunk, Rows& rows) const {
    const int64_t steps = (chunk.dim + kWidth - 1) / kWidth, block = steps * kTile;
    clear();
    for (int64_t s = 0; s < steps; ++s) {
      tiles::load<4>(rows.q + s * kWidth, rows.width * int64_t(sizeof(bf16)));
      multiply(k_ + s * kTile, block);
    }
    constexpr int64_t kStride = kKeys * sizeof(float);
    tiles::store<0>(rows.scores, kStride);
    tiles::store<1>(rows.scores + kBlock, kStride);
    tiles::store<2>(rows.scores + 2 * kBlock, kStride);
    tiles::store<3>(rows.scores + 3 * kBlock, kStride);
  }

  void gather(const Chunk& chunk, Rows& rows) {
    for (int64_t d = 0; d < chunk.dim; d += kTogether * kLine) {
      clear();
      for (int64_t s = 0; s < kSteps; ++s) {
        tiles::load<4>(rows.weights + s * kWidth, kKeys * sizeof(bf16));
        multiply(v_ + (d / kLine * kSteps + s) * kTile, kSteps * kTile);
      }
      constexpr int64_t kStride = kTogether * kLine * sizeof(float);
      tiles::store<0>(sums_, kStride);
      tiles::store<1>(sums_ + kLine, kStride);
      tiles::store<2>(sums_ + 2 * kLine, kStride);
      tiles::store<3>(sums_ + 3 * kLine, kStride);
      add_up(rows, d, std::min<int64_t>(kTogether * kLine, chunk.dim - d));
    }
  }

 private:
  static constexpr int kLine = 16;            // float32 values of a tile's row
  static constexpr int kTile = 16 * kWidth;   // bf16 values
  static constexpr int kTogether = 4;         // tiles of sums
  static constexpr int kSteps = kKeys / kWidth;

  static void clear() {
    tiles::zero<0>();
    tiles::zero<1>();
    tiles::zero<2>();
    tiles::zero<3>();
  }

  // The tile of A with four tiles of B, `apart` from each other.
  static void multiply(const bf16* b, int64_t apart) {
    tiles::load<6>(b, tiles::kLine);
    tiles::multiply<0, 4, 6>();
    tiles::load<7>(b + apart, tiles::kLine);
    tiles::multiply<1, 4, 7>();
    tiles::load<6>(b + 2 * apart, tiles::kLine);
    tiles::multiply<2, 4, 6>();
    tiles::load<7>(b + 3 * apart, tiles::kLine);
    tiles::multiply<3, 4, 7>();
  }

  static void interleave(bf16* out, const bf16* a, const bf16* b, int lanes) {
#if defined(__AVX512F__)
    _mm512_storeu_si512(out, interleaved(a, b, __mmask16((1u << lanes) - 1)));
#else
    for (int l = 0; l < 16; ++l) {
      out[2 * l] = a && l < lanes ? a[l] : bf16{0};
      out[2 * l + 1] = b && l < lanes ? b[l] : bf16{0};
    }
#endif
  }

  void take_keys(const Chunk& chunk, int block, int64_t steps) {
    bf16* out = k_ + block * steps * kTile;
    for (int64_t d = 0; d < steps * kWidth; d += 2, out += kWidth) {
      const bf16* k = d < chunk.dim ? chunk.k[block] + d * kBlock : nullptr;
      interleave(out, k, k ? k + kBlock : nullptr, kBlock);
    }
  }

  // Two keys' values, or zeros where no row sees them, to [16 dimensions][32 keys] tiles.
  void take_values(const Chunk& chunk, int key) {
    const bf16 *first = chunk.values(key), *second = chunk.values(key + 1);
    const int64_t pair = key / 2 * kWidth;  // within a row of tiles
    const int64_t tiles_of_sums = (chunk.dim + kTogether * kLine - 1) / (kTogether * kLine);
    for (int64_t t = 0; t < tiles_of_sums * kTogether; ++t) {
      const int64_t d = t * kLine, lanes = std::clamp<int64_t>(chunk.dim - d, 0, kLine);
      interleave(v_ + t * kSteps * kTile + pair, first && lanes ? first + d : nullptr,
                 second && lanes ? second + d : nullptr, int(lanes));
    }
  }

  void add_up(Rows& rows, int64_t d, int64_t dims) const {
    for (int r = 0; r < rows.count; ++r) {
      float* acc = rows.rows[r].acc + d;
      const float* more = sums_ + r * kTogether * kLine;
      const vec shrink = splat(rows.shrink[r]);
      for (int64_t i = 0; i < dims; i += kLanes)
        store(acc + i, add(mul(load(acc + i), shrink), load(more + i)));
    }
  }

  alignas(64) bf16 k_[kKeys * kHeadMax];  // [block][32 dimensions][16 pairs][16 keys][2]
  alignas(64) bf16 v_[kKeys * kHeadMax];  // [16 dimensions][32 keys][16 pairs][16 dimensions][2]
  alignas(64) float sums_[kTogether * kLine * kRows];
};

}  // namespace c2c::chunks
