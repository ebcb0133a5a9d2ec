// The products of a chunk of attention on AMX tiles, of up to 16 rows. Keys and values are laid out
// in pairs.
//
//   scores   A = q [16 rows][32 dimensions]    B = k [16 pairs of dimensions][16 keys]
//   sums     A = weights [16 rows][32 keys]    B = v [16 pairs of keys][16 dimensions]
#pragma once
#include "../chunks.h"

namespace c2c::chunks {

class Units {
 public:
  using Session = tiles::Session;
  // Totals are sums, too: those of values that are all one.
  static constexpr bool kAddTotals = true;

  Units() { std::fill_n(ones_, kTile, bf16{0x3f80}); }

  void take(const Chunk& chunk) {
    const int64_t steps = (chunk.dim + kWidth - 1) / kWidth;
    for (int block = 0; block < kBlocks; ++block)
      if (chunk.holds(block)) take_keys(chunk, block, steps);
    for (int key = 0; key < kKeys; key += 2) take_values(chunk, key);
  }

  // Scores of blocks that are not there are of no use, and are not looked at.
  void score(const Chunk& chunk, Rows& rows) const {
    const int64_t steps = (chunk.dim + kWidth - 1) / kWidth, block = steps * kTile;
    tiles::zero_sums();
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

  // Sums stay where rows have them; only those of a row whose peak has risen are scaled.
  void gather(const Chunk& chunk, Rows& rows) {
    const int64_t lines = RowState::padded(chunk.dim) / kLine;
    for (int r = 0; r < rows.count; ++r)
      if (rows.shrink[r] != 1.0f) shrink(rows.rows[r].acc, lines, rows.shrink[r]);
    float* acc = rows.rows->acc;
    for (int64_t t = 0; t <= lines; t += kTogether) {
      const int64_t count = std::min<int64_t>(kTogether, lines + 1 - t);
      const auto value = [&](int64_t i, int64_t s) {
        return t + i < lines ? v_ + ((t + i) * kSteps + s) * kTile : ones_;
      };
      const auto each = [&](const auto& body) {
        body(std::integral_constant<int, 0>());
        if (count > 1) body(std::integral_constant<int, 1>());
        if (count > 2) body(std::integral_constant<int, 2>());
        if (count > 3) body(std::integral_constant<int, 3>());
      };
      each([&](auto i) { tiles::load<i()>(acc + (t + i()) * kLine, sizeof(RowState)); });
      for (int64_t s = 0; s < kSteps; ++s) {
        tiles::load<4>(rows.weights + s * kWidth, kKeys * sizeof(bf16));
        each([&](auto i) {
          tiles::load<6 + i() % 2>(value(i(), s), tiles::kLine);
          tiles::multiply<i(), 4, 6 + i() % 2>();
        });
      }
      each([&](auto i) { tiles::store<i()>(acc + (t + i()) * kLine, sizeof(RowState)); });
    }
  }

 private:
  static constexpr int kLine = 16;            // float32 values of a tile's row
  static constexpr int kTile = 16 * kWidth;   // bf16 values
  static constexpr int kTogether = 4;         // tiles of sums
  static constexpr int kSteps = kKeys / kWidth;

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
      if (k) prefetch_early(k + chunk.next[block]);
    }
  }

  // Two keys' values, or zeros where no row sees them, to [16 dimensions][32 keys] tiles.
  void take_values(const Chunk& chunk, int key) {
    const bf16 *first = chunk.values(key), *second = chunk.values(key + 1);
    const int64_t pair = key / 2 * kWidth;  // within a row of tiles
    const int64_t lines_of_tiles = RowState::padded(chunk.dim) / kLine;
    for (int64_t d = 0; first && d < chunk.dim; d += 2 * kLine) {
      prefetch_early(first + d + chunk.next[key / kBlock]);
      if (second) prefetch_early(second + d + chunk.next[key / kBlock]);
    }
    for (int64_t t = 0; t < lines_of_tiles; ++t) {
      const int64_t d = t * kLine, lanes = std::min<int64_t>(chunk.dim - d, kLine);
      interleave(v_ + t * kSteps * kTile + pair, first ? first + d : nullptr,
                 second ? second + d : nullptr, int(lanes));
    }
  }

  static void shrink(float* acc, int64_t lines, float by) {
    for (int64_t i = 0; i < (lines + 1) * kLine; i += kLanes)
      store(acc + i, mul(load(acc + i), splat(by)));
  }

  alignas(64) bf16 k_[kKeys * kHeadMax];  // [block][32 dimensions][16 pairs][16 keys][2]
  alignas(64) bf16 v_[kKeys * kHeadMax];  // [16 dimensions][32 keys][16 pairs][16 dimensions][2]
  alignas(64) bf16 ones_[kTile];
};

}  // namespace c2c::chunks
