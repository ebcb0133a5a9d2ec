#include "driver.h"

#include <string>

#include "../native/links.h"

namespace c2c::multipath {
namespace {

template <typename F>
void find(F& function, const char* name) {
  function = real_as<F>(name);
  if (function == nullptr)
    throw transfer::Fault(std::string("CUDA's driver is too old: it lacks ") + name);
}

transfer::Cuda relays_driver() {
  const PassThrough own;
  return transfer::Cuda("libcuda.so.1");
}

}  // namespace

Driver::Driver() : cuda(relays_driver()) {
  find(device_count, "cuDeviceGetCount");
  find(device_get, "cuDeviceGet");
  find(primary_retain, "cuDevicePrimaryCtxRetain");
  find(stream_context, "cuStreamGetCtx");
  find(is_capturing, "cuStreamIsCapturing");
  find(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  find(pair_attribute, "cuDeviceGetP2PAttribute");
  find(can_access, "cuDeviceCanAccessPeer");
  find(elapsed, "cuEventElapsedTime");
  find(attributes, "cuPointerGetAttributes");
  find(create, "cuMemCreate");
  find(release, "cuMemRelease");
  find(reserve, "cuMemAddressReserve");
  find(unreserve, "cuMemAddressFree");
  find(map, "cuMemMap");
  find(unmap, "cuMemUnmap");
  find(set_access, "cuMemSetAccess");
}

}  // namespace c2c::multipath
