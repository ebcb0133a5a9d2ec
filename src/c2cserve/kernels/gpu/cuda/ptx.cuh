// The instructions of sm_90a that CUDA C++ has no words for, one thin wrapper each.
// Shared-memory addresses are 32-bit (cvta), barriers are mbarriers, phases are parities.
#pragma once

#include <cuda.h>  // CUtensorMap
#include <stdint.h>

namespace ptx {

__device__ __forceinline__ uint32_t smem(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The address of the same variable in another CTA of the cluster.
__device__ __forceinline__ uint32_t mapa(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// Nanoseconds, of one clock for the whole GPU.
__device__ __forceinline__ uint64_t global_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Orders execution, not memory: barriers are made visible by `barrier_init_fence`.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- arithmetic as Triton's compiler has it ------------------------------------------------------

__device__ __forceinline__ float exp2(float x) {
  float value;
  asm("ex2.approx.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}

__device__ __forceinline__ float divide(float a, float b) {
  float value;
  asm("div.full.f32 %0, %1, %2;" : "=f"(value) : "f"(a), "f"(b));
  return value;
}

// ---- programmatic dependent launch ---------------------------------------------------------------

// What comes after this sees all that earlier kernels of the stream wrote.
__device__ __forceinline__ void wait_for_earlier_kernels() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- mbarriers -----------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem(barrier)), "r"(arrivals));
}

// Makes initialised barriers visible to the copy engine and the cluster.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem(barrier)) : "memory");
}

__device__ __forceinline__ void arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem(barrier)),
               "r"(bytes)
               : "memory");
}

// Arrives at the same barrier of another CTA of the cluster. It orders only what tensor cores and
// TMA do: reads of a stage that have ended, and boxes that arrive. A pipeline of stages needs no
// more. A release at cluster scope would be a fence of the whole GPU's memory, and cost
// microseconds a stage.
__device__ __forceinline__ void arrive_at(uint64_t* barrier, uint32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapa(smem(barrier), rank))
               : "memory");
}

__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}" ::"r"(smem(barrier)),
      "r"(parity)
      : "memory");
}

// The pair for shared memory that threads of other CTAs write and read themselves.
__device__ __forceinline__ void arrive_release_at(uint64_t* barrier, uint32_t rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                   mapa(smem(barrier), rank))
               : "memory");
}

__device__ __forceinline__ void wait_acquire(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}" ::"r"(smem(barrier)),
      "r"(parity)
      : "memory");
}

// ---- the tensor copy engine (TMA) ----------------------------------------------------------------

// For a map in global memory that was written by a copy: makes what was written the engine's.
__device__ __forceinline__ void acquire_map(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A box of a matrix into shared memory: `column` is the contiguous dimension.
__device__ __forceinline__ void load_box(const CUtensorMap* map, uint64_t* barrier, void* target,
                                         int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(smem(target)),
      "l"(map), "r"(smem(barrier)), "r"(column), "r"(row)
      : "memory");
}

// A box of one of a stack of matrices.
__device__ __forceinline__ void load_box(const CUtensorMap* map, uint64_t* barrier, void* target,
                                         int column, int row, int matrix) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(smem(target)),
      "l"(map), "r"(smem(barrier)), "r"(column), "r"(row), "r"(matrix)
      : "memory");
}

// The same box into the same place of every CTA in `ranks`, each told at its own barrier.
__device__ __forceinline__ void load_box_multicast(const CUtensorMap* map, uint64_t* barrier,
                                                   void* target, int column, int row, int matrix,
                                                   uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(smem(target)),
      "l"(map), "r"(smem(barrier)), "r"(column), "r"(row), "r"(matrix), "h"(ranks)
      : "memory");
}

__device__ __forceinline__ void store_box(const CUtensorMap* map, const void* source, int column,
                                          int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
                   map),
               "r"(smem(source)), "r"(column), "r"(row)
               : "memory");
}

// The engine adds the box to what is in memory, in the type of the map.
__device__ __forceinline__ void add_box(const CUtensorMap* map, const void* source, int column,
                                        int row) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group"
      " [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(smem(source)), "r"(column), "r"(row)
      : "memory");
}

// Contiguous bytes, no map; addresses and sizes are multiples of 16.
__device__ __forceinline__ void load_bytes(void* target, const void* source, uint32_t bytes,
                                           uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1], %2, [%3];" ::"r"(smem(target)),
      "l"(source), "r"(bytes), "r"(smem(barrier))
      : "memory");
}

__device__ __forceinline__ void store_bytes(void* target, const void* source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
               "r"(smem(source)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until all but `kPending` groups of this thread have read their shared memory.
template <int kPending>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Until all but `kPending` groups of this thread have written global memory.
template <int kPending>
__device__ __forceinline__ void wait_stores_done() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Between ordinary writes to shared memory and the copy engine's reads of them.
__device__ __forceinline__ void fence_shared_to_engine() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Between what ordinary accesses have seen in global memory and the copy engine's.
__device__ __forceinline__ void fence_global_to_engine() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// ---- flags between CTAs, and between engines and CTAs, in global memory ---------------------------

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

__device__ __forceinline__ void add_release(uint32_t* flag, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// Where nothing was written that the reader of the flag will read.
__device__ __forceinline__ void add_relaxed(uint32_t* flag, uint32_t value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// ---- shared memory of the cluster, and transposing stores -----------------------------------------

__device__ __forceinline__ float load_float(uint32_t address) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

// Four 8x8 matrices of 16-bit elements, each stored transposed: lane i gives row i's address.
__device__ __forceinline__ void store_transposed(uint32_t address, uint32_t a, uint32_t b,
                                                 uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

}  // namespace ptx
