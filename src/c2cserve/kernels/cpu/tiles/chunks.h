// The products of a chunk of attention on AMX tiles, of up to 16 rows. The cache has keys and values
// in pairs, as B.
//
//   scores   A = q [16 rows][32 dimensions]    B = k [16 pairs of dimensions][16 keys]
//   sums     A = weights [16 rows][32 keys]    B = v [16 pairs of keys][16 dimensions]
#pragma once
#include "../attention/chunks.h"

namespace c2c::chunks {

class Units {
 public:
  using Session = tiles::Session;
  // Totals are sums, too: those of values that are all one.
  static constexpr bool kAddTotals = true;

  Units() { std::fill_n(ones_, kTile, bf16{0x3f80}); }

  void take(const Chunk& chunk) {
    for (int block = 0; block < kBlocks; ++block)
      if (chunk.holds(block)) take_keys(chunk, block);
    for (int key = 0; key < kKeys; key += 2) take_values(chunk, key);
  }

  // Scores of blocks that are not there are zeros, and are not looked at.
  void score(const Chunk& chunk, Rows& rows) const {
    tiles::zero_sums();
    for (int64_t s = 0; s * kWidth < chunk.dim; ++s) {
      const bool whole = (s + 1) * kWidth <= chunk.dim;
      const auto keys = [&](int block) {
        return whole ? chunk.k[block] + s * kTile : ends_ + block * kTile;
      };
      tiles::load<4>(rows.q + s * kWidth, rows.width * int64_t(sizeof(bf16)));
      if (chunk.holds(0)) multiply<0>(keys(0));
      if (chunk.holds(1)) multiply<1>(keys(1));
      if (chunk.holds(2)) multiply<2>(keys(2));
      if (chunk.holds(3)) multiply<3>(keys(3));
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

  // The tile of A with one of B.
  template <int C>
  static void multiply(const bf16* b) {
    tiles::load<6 + C % 2>(b, tiles::kLine);
    tiles::multiply<C, 4, 6 + C % 2>();
  }

  // Keys are read where they lie, but for the last dimensions if those fill no tile.
  void take_keys(const Chunk& chunk, int block) {
    const bf16* k = chunk.k[block];
    for (int64_t d = 0; d < chunk.dim; d += 2) prefetch_early(k + d * kBlock + chunk.next[block]);
    const int64_t whole = chunk.dim / kWidth * kWidth, rest = (chunk.dim - whole) * kBlock;
    if (rest == 0) return;
    bf16* out = ends_ + block * kTile;
    std::memcpy(out, k + whole * kBlock, size_t(rest) * sizeof(bf16));
    std::memset(out + rest, 0, size_t(kTile - rest) * sizeof(bf16));
  }

  // Two keys' values, or zeros where no row sees them, to [16 dimensions][32 keys] tiles. Those of a tile
  // lie in two blocks: so they are copied.
  void take_values(const Chunk& chunk, int key) {
    const uint32_t seen = chunk.seen(key);
    const bf16* pairs = seen ? chunk.values(key) : nullptr;
    const int64_t next = chunk.next[key / kBlock];
    bf16* out = v_ + key / 2 * kWidth;
    for (int64_t d = 0; d < chunk.dim; d += kLine, out += kSteps * kTile) {
      copy_pairs(out, pairs + 2 * d, seen & first_pairs(chunk.dim - d));
      if (seen) prefetch_early(pairs + 2 * d + next);
    }
  }

  static void shrink(float* acc, int64_t lines, float by) {
    for (int64_t i = 0; i < (lines + 1) * kLine; i += kLanes)
      store(acc + i, mul(load(acc + i), splat(by)));
  }

  alignas(64) bf16 ends_[kBlocks * kTile];  // [block][16 pairs of dimensions][16 keys][2]
  alignas(64) bf16 v_[kKeys * kHeadMax];  // [16 dimensions][32 keys][16 pairs][16 dimensions][2]
  alignas(64) bf16 ones_[kTile];
};

}  // namespace c2c::chunks
