// Access of GPUs to one another, which this library and the program both ask for.
#pragma once
#include "real.h"

namespace c2c::multipath {

// Notes that the context `from` has access to `to`, and whether the program had asked for it.
void note_peer(void* from, void* to, bool by_program);

}  // namespace c2c::multipath

extern "C" c2c::multipath::CudaResult cuCtxEnablePeerAccess(void* peer, unsigned flags);
extern "C" c2c::multipath::CudaResult cuCtxDisablePeerAccess(void* peer);
