// The tile registers of AMX: eight matrices of 16 rows x 64 bytes, and C += A B in bf16.
//
//   A   [16 rows][32 columns]          rows of a row-major matrix, 64 bytes of each
//   B   [16 pairs][16][2]              columns of A in pairs: pair p holds columns 2 p and 2 p + 1
//   C   [16][16] float32
//
// An element of C depends on its row of A, its column of B and itself. Two sums, of the even and
// the odd columns, start at zero and walk up. Then they are added, and the sum is added to C.
#pragma once
#include <cstdint>

#if defined(__AMX_BF16__) && !defined(C2C_TILE_MODEL)
#define C2C_TILES 1
#elif defined(C2C_TILE_MODEL)
#define C2C_TILES 1
#include "model.h"
#endif

#if defined(C2C_TILES)
namespace c2c::tiles {

constexpr int kRows = 16;       // of every tile
constexpr int kLine = 64;       // bytes of a row
constexpr int kColumns = 32;    // bf16 values of a row of A
constexpr int kBytes = kRows * kLine;

// As LDTILECFG reads it.
struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t line_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(Config) == 64, "the processor reads 64 bytes");

#if !defined(C2C_TILE_MODEL)
// Inline assembly instead of intrinsics, whose operands cannot be template arguments.
inline void configure(const Config& config) {
  asm volatile("ldtilecfg %0" ::"m"(config));
}
inline void release() { asm volatile("tilerelease"); }
template <int T>
inline void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
inline void load(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void store(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B>
inline void multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
#else
inline void configure(const Config& config) { tile_model::configure(&config); }
inline void release() { tile_model::release(); }
template <int T>
inline void zero() {
  tile_model::zero(T);
}
template <int T>
inline void load(const void* p, int64_t stride) {
  tile_model::load(T, p, stride);
}
template <int T>
inline void store(void* p, int64_t stride) {
  tile_model::store(T, p, stride);
}
template <int C, int A, int B>
inline void multiply() {
  tile_model::multiply(C, A, B);
}
#endif

// The tiles that hold sums.
inline void zero_sums() {
  zero<0>();
  zero<1>();
  zero<2>();
  zero<3>();
}

// The calling thread's tiles, all of full size except that C (0 to 3) and B (6 and 7) may have
// fewer than 16 columns, and C and A (4 and 5) fewer than 16 rows. The system saves tiles at every
// switch: they are given back.
class Session {
 public:
  explicit Session(int columns = kRows, int rows = kRows) {
    Config config;
    for (int t = 0; t < 8; ++t) {
      config.rows[t] = uint8_t(t < 6 ? rows : kRows);
      config.line_bytes[t] = uint16_t(t == 4 || t == 5 ? kLine : 4 * columns);
    }
    configure(config);
  }
  ~Session() { release(); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
};

}  // namespace c2c::tiles
#endif
