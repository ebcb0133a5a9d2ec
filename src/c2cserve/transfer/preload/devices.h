// GPUs that the program does not see, and that relay for those it sees.
//
// CUDA reads CUDA_VISIBLE_DEVICES once, when it is initialised. For that time it has the borrowed
// GPUs at its end. So the program's ones keep their numbers, and a lower count hides the others.
#pragma once
#include "real.h"

namespace c2c::multipath {

CudaResult init_with_borrowed(CudaResult (*driver)(unsigned), unsigned flags);
int visible(int count);           // of so many GPUs
bool is_borrowed(int ordinal);

}  // namespace c2c::multipath
