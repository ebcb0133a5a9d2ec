// The functions of CUDA's driver that programs get from this library.
#pragma once
#include <stdint.h>

namespace c2c::multipath {

// Returns the function for a name of the library's symbol table, null if it is not hooked.
void* hook_named(const char* name);

// Returns what a program gets of cuGetProcAddress, which has `found` for these arguments.
void* hook_for(const char* symbol, int version, uint64_t flags, void* found);

}  // namespace c2c::multipath
