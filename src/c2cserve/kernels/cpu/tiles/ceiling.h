// How fast tiles multiply operands that come from one cache or another: what `linear` can reach.
#pragma once
#include "strips.h"

#if defined(C2C_TILES)
namespace c2c {

// Small numbers in bf16. Zeros take less power, so a processor multiplies them faster. They are made
// once: that would take much of a call's time.
class Noise {
 public:
  const uint8_t* of(int64_t bytes) {
    auto* values = reinterpret_cast<bf16*>(room_.room(bytes / int64_t(sizeof(float))));
    uint32_t seed = 1;
    for (int64_t i = 0; bytes > made_ && i < bytes / int64_t(sizeof(bf16)); ++i) {
      seed = seed * 1664525u + 1013904223u;
      values[i].bits = uint16_t(0x3c00 | (seed >> 16 & 0x80ff));
    }
    made_ = std::max(made_, bytes);
    return reinterpret_cast<const uint8_t*>(values);
  }

 private:
  Scratch room_;
  int64_t made_ = 0;  // bytes
};

// Every thread does `steps` steps of four products. Their operands are read round and round from
// `w_bytes` and `x_bytes` of memory, whole steps of 2 KiB each. Returns how many floating-point
// operations that was.
inline double tile_steps(ThreadPool& pool, int64_t w_bytes, int64_t x_bytes, int64_t steps) {
  using namespace tile_linear;
  constexpr int64_t kStep = 2 * tiles::kBytes;
  pool.run(pool.size(), [&](int, int) {
    thread_local Noise ws, xs;
    const uint8_t *w = ws.of(w_bytes), *x = xs.of(x_bytes);
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
