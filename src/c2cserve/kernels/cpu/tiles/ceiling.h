// How fast tiles multiply operands that come from one cache or another: what `linear` can reach.
#pragma once
#include "strips.h"

#if defined(C2C_TILES)
namespace c2c {

// Small numbers in bf16. Zeros take less power, so a processor multiplies them faster.
inline void fill_with_noise(uint8_t* at, int64_t bytes) {
  auto* values = reinterpret_cast<bf16*>(at);
  uint32_t seed = 1;
  for (int64_t i = 0; i < bytes / int64_t(sizeof(bf16)); ++i) {
    seed = seed * 1664525u + 1013904223u;
    values[i].bits = uint16_t(0x3c00 | (seed >> 16 & 0x80ff));
  }
}

// Every thread does `steps` steps of four products. Their operands are read round and round from
// `w_bytes` and `x_bytes` of memory, whole steps of 2 KiB each. Returns how many floating-point
// operations that was.
inline double tile_steps(ThreadPool& pool, int64_t w_bytes, int64_t x_bytes, int64_t steps) {
  using namespace tile_linear;
  constexpr int64_t kStep = 2 * tiles::kBytes;
  pool.run(pool.size(), [&](int, int) {
    thread_local Scratch ws, xs;
    auto* w = reinterpret_cast<uint8_t*>(ws.room(w_bytes / 4));
    auto* x = reinterpret_cast<uint8_t*>(xs.room(x_bytes / 4));
    fill_with_noise(w, w_bytes);
    fill_with_noise(x, x_bytes);
    const tiles::Session session;
    const Source source{w, tiles::kLine, tiles::kBytes, kStep};
    Chain<2, 2>::begin(nullptr);
    int64_t w_at = 0, x_at = 0;
    for (int64_t i = 0; i < steps; ++i) {
      const auto* first = reinterpret_cast<const bf16*>(x + x_at);
      const bf16* at[2] = {first, first + tiles::kBytes / 2};
      Chain<2, 2>::step(w + w_at, source, at, tiles::kLine);
      w_at = w_at + kStep < w_bytes ? w_at + kStep : 0;
      x_at = x_at + kStep < x_bytes ? x_at + kStep : 0;
    }
    Chain<2, 2>::end(Buffers::of_thread().sums);
  });
  return 2.0 * 4 * kTile * kTile * kStepColumns * double(steps) * pool.size();
}

}  // namespace c2c
#endif
