// What this library needs of CUDA's driver beside what relays need (../native/cuda.h).
#pragma once
#include "real.h"

namespace c2c::multipath {

// Attributes of pointers.
constexpr int kPointerKind = 2, kDevicePointer = 3, kManagedMemory = 8, kOrdinal = 9;
constexpr int kRangeStart = 11, kRangeSize = 12;
constexpr int kMappingSize = 18, kMappingStart = 19;
constexpr int kKindHost = 1, kKindDevice = 2;  // values of `kPointerKind`
constexpr int kReadWrite = 3;                  // access to a mapping
constexpr int kNativeAtomics = 3;              // an attribute of two GPUs: NVLink has them
constexpr int kRelaxedCapture = 2;

struct AccessDesc {  // CUmemAccessDesc
  int location_kind;  // 1: a device
  int location_id;
  int flags;
};
static_assert(sizeof(AccessDesc) == 12);

struct AllocationProp {  // CUmemAllocationProp
  int kind;              // 1: pinned
  int handles;           // for other processes: none
  int location_kind;     // as above
  int location_id;
  void* of_windows;
  uint8_t flags[8];
};
static_assert(sizeof(AllocationProp) == 32);
using AllocationHandle = unsigned long long;

// Does not change what the program's stream captures in other threads allow.
struct Driver {
  Driver();  // throws `Fault`

  transfer::Cuda cuda;
  CudaResult (*device_count)(int*);
  CudaResult (*device_get)(int* device, int ordinal);
  CudaResult (*primary_retain)(void** context, int device);
  CudaResult (*stream_context)(void* stream, void** context);
  CudaResult (*is_capturing)(void* stream, int* status);
  CudaResult (*exchange_capture_mode)(int* mode);
  CudaResult (*pair_attribute)(int* value, int attribute, int device, int peer);
  CudaResult (*can_access)(int* can, int device, int peer);
  CudaResult (*elapsed)(float* milliseconds, void* start, void* end);
  CudaResult (*attributes)(unsigned count, const int* which, void** values, CudaPointer pointer);
  // Memory that is mapped for the GPUs that are named.
  CudaResult (*create)(AllocationHandle*, size_t size, const AllocationProp*, uint64_t flags);
  CudaResult (*release)(AllocationHandle);
  CudaResult (*reserve)(CudaPointer* start, size_t size, size_t alignment, CudaPointer, uint64_t);
  CudaResult (*unreserve)(CudaPointer start, size_t size);
  CudaResult (*map)(CudaPointer start, size_t size, size_t offset, AllocationHandle, uint64_t);
  CudaResult (*unmap)(CudaPointer start, size_t size);
  CudaResult (*set_access)(CudaPointer start, size_t size, const AccessDesc*, size_t count);

  // Of the thread's current context. It is 0 where the driver knows none: that is no error for
  // this function, as a program's memory may be any.
  template <typename T>
  bool attribute(T* value, int which, CudaPointer pointer) const {
    *value = T{};
    void* values[] = {value};
    return attributes(1, &which, values, pointer) == kCudaOk;
  }
};

// Lets this thread make calls that are not allowed while any thread captures a stream in the global
// mode. Nothing that is captured is touched by them.
class CaptureRelaxed {
 public:
  explicit CaptureRelaxed(const Driver& driver) : driver_(driver) {
    driver.exchange_capture_mode(&mode_);
  }
  ~CaptureRelaxed() { driver_.exchange_capture_mode(&mode_); }
  CaptureRelaxed(const CaptureRelaxed&) = delete;

 private:
  const Driver& driver_;
  int mode_ = kRelaxedCapture;
};

}  // namespace c2c::multipath
