// What the tile instructions do, in plain C++: with it, tests run the kernels for AMX anywhere.
// A misuse that would be a fault of the processor ends the program.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace c2c::tile_model {

struct State {
  bool configured = false;
  int rows[8] = {}, line_bytes[8] = {};
  uint8_t data[8][16][64] = {};
};

inline State& state() {
  thread_local State one;
  return one;
}

inline void expect(bool held, const char* what) {
  if (held) return;
  std::fprintf(stderr, "tile model: %s\n", what);
  std::abort();
}

inline State& configured() {
  expect(state().configured, "a tile is used before LDTILECFG");
  return state();
}

inline void configure(const void* config) {
  State& s = state();
  const auto* bytes = static_cast<const uint8_t*>(config);
  expect(bytes[0] == 1 && bytes[1] == 0, "only palette 1 exists");
  s = State{};
  s.configured = true;
  for (int t = 0; t < 8; ++t) {
    uint16_t line;
    std::memcpy(&line, bytes + 16 + 2 * t, 2);
    s.line_bytes[t] = line;
    s.rows[t] = bytes[48 + t];
    expect(line <= 64 && s.rows[t] <= 16, "a tile has 16 rows of 64 bytes at most");
  }
}

inline void release() { state() = State{}; }

inline void zero(int t) { std::memset(configured().data[t], 0, sizeof(State::data[0])); }

inline void load(int t, const void* p, int64_t stride) {
  State& s = configured();
  zero(t);
  for (int r = 0; r < s.rows[t]; ++r)
    std::memcpy(s.data[t][r], static_cast<const uint8_t*>(p) + r * stride, size_t(s.line_bytes[t]));
}

inline void store(int t, void* p, int64_t stride) {
  State& s = configured();
  for (int r = 0; r < s.rows[t]; ++r)
    std::memcpy(static_cast<uint8_t*>(p) + r * stride, s.data[t][r], size_t(s.line_bytes[t]));
}

// Subnormal numbers count as zero, in and out.
inline float flushed(float v) { return std::fabs(v) < 0x1p-126f ? std::copysign(0.0f, v) : v; }

inline float bf16_at(const uint8_t* line, int i) {
  uint32_t bits = uint32_t(line[2 * i]) << 16 | uint32_t(line[2 * i + 1]) << 24;
  float value;
  std::memcpy(&value, &bits, 4);
  return flushed(value);
}

// Each step rounds once: a product of two bf16 values is exact, unless it is very small.
inline void multiply(int c, int a, int b) {
  State& s = configured();
  const int pairs = s.line_bytes[a] / 4, columns = s.line_bytes[c] / 4;
  expect(s.rows[c] == s.rows[a] && s.rows[b] == pairs && s.line_bytes[b] == s.line_bytes[c],
         "the shapes of a product's tiles do not fit");
  for (int m = 0; m < s.rows[c]; ++m)
    for (int n = 0; n < columns; ++n) {
      float sums[2] = {};
      for (int k = 0; k < pairs; ++k)
        for (int half = 0; half < 2; ++half)
          sums[half] = flushed(std::fma(bf16_at(s.data[a][m], 2 * k + half),
                                        bf16_at(s.data[b][k], 2 * n + half), sums[half]));
      float total;
      std::memcpy(&total, s.data[c][m] + 4 * n, 4);
      total = flushed(flushed(total) + flushed(sums[0] + sums[1]));
      std::memcpy(s.data[c][m] + 4 * n, &total, 4);
    }
}

}  // namespace c2c::tile_model
