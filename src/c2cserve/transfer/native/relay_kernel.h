// The relay kernel (relay.cu), as this process's GPUs launch it.
#pragma once
#include <vector>

#include "cuda.h"
#include "schedule.h"

namespace c2c::transfer {

constexpr int kRelayLanes = 2;     // streams: a kernel begins while the one before ends
constexpr int kRelayPieces = 160;  // of a launch: as many as kernel parameters hold

struct RelayParams {  // of relay.cu
  CudaPointer recalled, started;  // null: the launch cannot be recalled
  uint32_t number, pieces;
  uint32_t stages, stage_bytes, recall_poll_bytes;
  Piece piece[kRelayPieces];
};

struct RelayShape {  // `transfer.settings.RelayShape`
  int32_t ctas, threads, stages, stage_bytes, recall_poll_bytes;
};

struct RelayCode {
  const void* cubin;  // null: nothing relays
  RelayShape shape;
};

// All functions throw `Fault`.
class RelayKernel {
 public:
  RelayKernel(const Cuda& cuda, RelayCode code);
  ~RelayKernel();
  RelayKernel(const RelayKernel&) = delete;

  bool exists() const { return kernel_ != nullptr; }
  // Prepares launches on the GPU of the current context. Streams that will have launches get an
  // empty one: CUDA may wait for all that a context has when it first loads a kernel.
  void prepare(const std::vector<void*>& streams, RelayParams params);
  // Copies `pieces` in the order of a stream. The other parameters are those of the shape, and
  // what `params` has.
  void launch(RelayParams& params, const Piece* pieces, size_t count, void* stream);

 private:
  int shared_bytes() const;  // of a CTA

  const Cuda& cuda_;
  RelayShape shape_;
  void* library_ = nullptr;
  void* kernel_ = nullptr;
};

}  // namespace c2c::transfer
