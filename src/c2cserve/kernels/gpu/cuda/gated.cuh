// Gate and up in one tile of W: O = silu(X gate^T) * (X up^T).
//
// W [2 N, K] has the gate's N rows, then up's. The tensor map describes two matrices, and a box has
// 64 rows of each, so stages are the same as for any W. The first warpgroup sums the gate's rows
// and the second sums up's rows, for the same 64 columns of O. Sums are rounded to 16 bits, then
// combined with the instructions of `_silu_mul_kernel` (elementwise.py). So the bits are those of a
// GEMM with that kernel after it.
#pragma once

#include "pipeline.cuh"

namespace gated {

constexpr int kColumns = kBlockW / 2;  // of O in a tile
constexpr float kLog2E = 1.44269504f;

template <class T>
__device__ __forceinline__ float silu_mul(T type, uint16_t gate, uint16_t up) {
  const float value = widen(type, gate);
  return ptx::divide(value, 1.0f + ptx::exp2(-value * kLog2E)) * widen(type, up);
}

// Writes a tile of at most 64 rows of X, which are staged at once. Both warpgroups write their sums
// to shared memory, and each stores a part of the pieces of O.
template <class T, int kBX, int kCluster, int kStages, int kReleases>
__device__ __forceinline__ void store(const Pipeline<T, kBX, kCluster, kStages, kReleases>& stream,
                                      const float (&d)[kBX / 2], int group, const Work& work,
                                      const Output& out) {
  const uint16_t* values = out.bias == nullptr ? nullptr : out.bias + group * out.columns;
  float bias[2];
  stream.load_bias(bias, values, work.column, out.columns);
  stream.stage_chunk(d, 0, group, bias);
  ptx::named_barrier(1, kConsumers);
  for (int i = threadIdx.x - kWarpgroup; i < kBX * 8; i += kConsumers) {
    const int row = i / 8, piece = i % 8;
    if (row >= work.rows) break;
    const int at = row * 128 + ((piece ^ (row % 8)) * 16);
    const uint4 gates = *reinterpret_cast<const uint4*>(stream.staging(0) + at);
    const uint4 ups = *reinterpret_cast<const uint4*>(stream.staging(1) + at);
    const uint16_t* gate = reinterpret_cast<const uint16_t*>(&gates);
    const uint16_t* up = reinterpret_cast<const uint16_t*>(&ups);
    uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      pairs[j] = pack(T{}, silu_mul(T{}, gate[2 * j], up[2 * j]),
                      silu_mul(T{}, gate[2 * j + 1], up[2 * j + 1]));
    }
    out.put(make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]), work.x_row + row,
            work.column + piece * 8);
  }
  ptx::named_barrier(1, kConsumers);
}

}  // namespace gated
