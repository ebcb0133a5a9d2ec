// The few functions of CUDA's driver that transfers need, found when an engine is opened: this
// library is built where there is no CUDA.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <string>

namespace c2c::transfer {

using CudaResult = int;
using CudaPointer = unsigned long long;

constexpr CudaResult kCudaOk = 0, kCudaNotReady = 600;
constexpr unsigned kNonBlockingStream = 1;
constexpr unsigned kTimelessEvent = 2;
constexpr unsigned kPortableMappedMemory = 1 | 2;  // of allocations, and of registrations
constexpr int kMostDynamicShared = 8;            // an attribute of kernels
constexpr int kMemoryType = 2, kHostMemory = 1;  // an attribute of pointers, a value of it

struct CudaCopyAttributes {  // CUmemcpyAttributes
  int source_order;          // 1: the source is read in stream order
  int source_kind, source_id, target_kind, target_id;  // hints, for managed memory only
  unsigned flags;
};
static_assert(sizeof(CudaCopyAttributes) == 24);

struct Cuda {
  explicit Cuda(const std::string& library);  // throws `Fault`

  CudaResult (*error_name)(CudaResult, const char**);
  CudaResult (*push)(void* context);
  CudaResult (*pop)(void** context);
  CudaResult (*device)(int* device);  // of the current context
  CudaResult (*priorities)(int* lowest, int* highest);
  CudaResult (*stream_create)(void** stream, unsigned flags, int priority);
  CudaResult (*stream_destroy)(void* stream);
  CudaResult (*stream_synchronize)(void* stream);
  CudaResult (*stream_wait)(void* stream, void* event, unsigned flags);
  CudaResult (*event_create)(void** event, unsigned flags);
  CudaResult (*event_destroy)(void* event);
  CudaResult (*event_record)(void* event, void* stream);
  CudaResult (*event_query)(void* event);
  CudaResult (*copy)(CudaPointer target, CudaPointer source, size_t size, void* stream);
  CudaResult (*copy_batch)(CudaPointer* targets, CudaPointer* sources, size_t* sizes, size_t count,
                           CudaCopyAttributes* attributes, size_t* first_of_attributes,
                           size_t attributes_count, void* stream);
  CudaResult (*alloc)(CudaPointer* memory, size_t size);
  CudaResult (*free)(CudaPointer memory);
  CudaResult (*host_alloc)(void** memory, size_t size, unsigned flags);
  CudaResult (*host_free)(void* memory);
  CudaResult (*host_address)(CudaPointer* address, void* memory, unsigned flags);
  CudaResult (*pointer_attribute)(void* value, int attribute, CudaPointer pointer);
  CudaResult (*library_load)(void** library, const void* code, void* options, void* values,
                             unsigned count, void* library_options, void* library_values,
                             unsigned library_count);
  CudaResult (*library_kernel)(void** kernel, void* library, const char* name);
  CudaResult (*kernel_attribute)(int attribute, int value, void* kernel, int device);
  CudaResult (*library_unload)(void* library);
  CudaResult (*launch)(void* kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                       void* stream, void** parameters, void** extra);

  CudaResult (*host_register)(void* memory, size_t size, unsigned flags);
  CudaResult (*host_unregister)(void* memory);
  CudaResult (*stream_write)(void* stream, CudaPointer word, uint32_t value, unsigned flags);

  // Throws `Fault` with the name of the error.
  void check(const char* call, CudaResult result) const;
};

// Makes a GPU's context the thread's current one meanwhile. Throws `Fault`.
class Current {
 public:
  Current(const Cuda& cuda, void* context) : cuda_(cuda) {
    cuda.check("cuCtxPushCurrent", cuda.push(context));
  }
  ~Current() {
    void* popped;
    cuda_.pop(&popped);
  }
  Current(const Current&) = delete;

 private:
  const Cuda& cuda_;
};

}  // namespace c2c::transfer
