#include "relay_kernel.h"

#include <algorithm>

namespace c2c::transfer {

RelayKernel::RelayKernel(const Cuda& cuda, RelayCode code) : cuda_(cuda), shape_(code.shape) {
  if (code.cubin == nullptr) return;
  const auto loaded =
      cuda.library_load(&library_, code.cubin, nullptr, nullptr, 0, nullptr, nullptr, 0);
  cuda.check("cuLibraryLoadData(relay)", loaded);
  cuda.check("cuLibraryGetKernel(relay)", cuda.library_kernel(&kernel_, library_, "relay"));
}

RelayKernel::~RelayKernel() {
  if (library_ != nullptr) cuda_.library_unload(library_);
}

int RelayKernel::shared_bytes() const { return shape_.stages * shape_.stage_bytes; }

void RelayKernel::prepare(const std::vector<void*>& streams, RelayParams params) {
  int device = 0;
  cuda_.check("cuCtxGetDevice", cuda_.device(&device));
  // More than 48 KiB of shared memory have to be allowed, once on each GPU.
  cuda_.check("cuKernelSetAttribute",
              cuda_.kernel_attribute(kMostDynamicShared, shared_bytes(), kernel_, device));
  for (void* stream : streams) {
    launch(params, nullptr, 0, stream);
    cuda_.check("cuStreamSynchronize", cuda_.stream_synchronize(stream));
  }
}

void RelayKernel::launch(RelayParams& params, const Piece* pieces, size_t count, void* stream) {
  params.stages = shape_.stages;
  params.stage_bytes = shape_.stage_bytes;
  params.recall_poll_bytes = shape_.recall_poll_bytes;
  params.pieces = uint32_t(count);
  std::copy(pieces, pieces + count, params.piece);
  void* pointers[] = {&params};  // a launch copies them
  cuda_.check("cuLaunchKernel(relay)",
              cuda_.launch(kernel_, shape_.ctas, 1, 1, shape_.threads, 1, 1, shared_bytes(), stream,
                           pointers, nullptr));
}

}  // namespace c2c::transfer
