#include "cuda.h"

#include <dlfcn.h>

#include "links.h"

namespace c2c::transfer {
namespace {

template <typename F>
void find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (function == nullptr) throw Fault(std::string("CUDA's driver is too old: it lacks ") + name);
}

}  // namespace

Cuda::Cuda(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // it stays for good
  if (library == nullptr) throw Fault(dlerror());
  find(library, "cuGetErrorName", error_name);
  find(library, "cuCtxPushCurrent_v2", push);
  find(library, "cuCtxPopCurrent_v2", pop);
  find(library, "cuCtxGetDevice", device);
  find(library, "cuCtxGetStreamPriorityRange", priorities);
  find(library, "cuStreamCreateWithPriority", stream_create);
  find(library, "cuStreamDestroy_v2", stream_destroy);
  find(library, "cuStreamSynchronize", stream_synchronize);
  find(library, "cuStreamWaitEvent", stream_wait);
  find(library, "cuEventCreate", event_create);
  find(library, "cuEventDestroy_v2", event_destroy);
  find(library, "cuEventRecord", event_record);
  find(library, "cuEventQuery", event_query);
  find(library, "cuMemcpyAsync", copy);
  find(library, "cuMemcpyBatchAsync_v2", copy_batch);
  find(library, "cuMemAlloc_v2", alloc);
  find(library, "cuMemFree_v2", free);
  find(library, "cuMemHostAlloc", host_alloc);
  find(library, "cuMemFreeHost", host_free);
  find(library, "cuMemHostGetDevicePointer_v2", host_address);
  find(library, "cuPointerGetAttribute", pointer_attribute);
  find(library, "cuLibraryLoadData", library_load);
  find(library, "cuLibraryGetKernel", library_kernel);
  find(library, "cuKernelSetAttribute", kernel_attribute);
  find(library, "cuLibraryUnload", library_unload);
  find(library, "cuLaunchKernel", launch);
  find(library, "cuMemHostRegister_v2", host_register);
  find(library, "cuMemHostUnregister", host_unregister);
  find(library, "cuStreamWriteValue32_v2", stream_write);
}

void Cuda::check(const char* call, CudaResult result) const {
  if (result == kCudaOk) return;
  const char* name = nullptr;
  error_name(result, &name);
  throw Fault(std::string(call) + ": " + (name ? name : "an unknown error") + " (" +
              std::to_string(result) + ")");
}

}  // namespace c2c::transfer
