// What hooked functions call: spreads a copy if that can be done.
#pragma once
#include "memory.h"

namespace c2c::multipath {

// Return false if nothing was begun, and the plain path has to take the copy. Else the driver's
// result is in `result`.
bool spread(const Copy& copy, CudaResult* result);
bool spread_and_wait(const Copy& copy, CudaResult* result);

// All copies take the plain path from now on.
void stop_spreading(Reason reason);

}  // namespace c2c::multipath
