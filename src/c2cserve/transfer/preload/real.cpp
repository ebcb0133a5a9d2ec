// `dlsym`, and what it has to know.
#include "real.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <atomic>

#include "hooks.h"
#include "report.h"

namespace c2c::multipath {
namespace {

constexpr char kDriver[] = "libcuda.so.1";
constexpr uint64_t kBufferLeast = 4 << 10;
thread_local int passing = 0;
std::atomic<bool> given{false};

using Dlsym = void* (*)(void*, const char*);

}  // namespace

extern "C" {
// Of the C library. The function below jumps to it.
__attribute__((visibility("hidden"))) Dlsym c2c_real_dlsym = nullptr;
__attribute__((visibility("hidden"))) void* c2c_hook_of(void* handle, const char* name);
}

namespace {

Dlsym real_dlsym() {
  if (c2c_real_dlsym != nullptr) return c2c_real_dlsym;
  void* found = nullptr;
  for (const char* version : {"GLIBC_2.2.5", "GLIBC_2.17", "GLIBC_2.34"}) {
    if (found == nullptr) found = dlvsym(RTLD_NEXT, "dlsym", version);
  }
  if (found == nullptr) {
    say("the C library's dlsym has no version that is known here");
    abort();  // nothing in this process could go on
  }
  return c2c_real_dlsym = reinterpret_cast<Dlsym>(found);
}

// Programs ask for a symbol before libraries' constructors have run, too.
__attribute__((constructor)) void find_dlsym() { real_dlsym(); }

uint64_t number_of(const char* variable, uint64_t otherwise) {
  const char* text = getenv(variable);
  if (text == nullptr || *text == 0) return otherwise;
  char* end = nullptr;
  const uint64_t number = strtoull(text, &end, 10);
  if (*end == 0) return number;
  say(std::string(variable) + " is no number: " + text);
  return otherwise;
}

}  // namespace

void* real(const char* name) {
  static void* const driver = [] {
    const PassThrough passing;  // a library that is loaded may look for symbols
    return dlopen(kDriver, RTLD_NOW | RTLD_LOCAL);
  }();
  return driver == nullptr ? nullptr : real_dlsym()(driver, name);
}

bool cuda_was_used() {
  void* driver = dlopen(kDriver, RTLD_NOW | RTLD_NOLOAD | RTLD_LOCAL);
  if (driver == nullptr) return false;
  void* const found = real_dlsym()(driver, "cuDeviceGetCount");
  const auto count = reinterpret_cast<CudaResult (*)(int*)>(found);
  int devices = 0;
  const bool used = count != nullptr && count(&devices) != kNotInitialized;
  dlclose(driver);
  return used;
}

bool hooks_were_given() { return given; }
void note_hook() { given.store(true, std::memory_order_relaxed); }

PassThrough::PassThrough() { ++passing; }
PassThrough::~PassThrough() { --passing; }

const Options& options() {
  static const Options made = [] {
    Options found;
    found.least_bytes = number_of("C2CSERVE_MULTIPATH_LEAST_BYTES", found.least_bytes);
    const uint64_t buffer = number_of("C2CSERVE_MULTIPATH_BUFFER_BYTES", found.buffer_bytes);
    found.buffer_bytes = std::max(buffer, kBufferLeast) / kBufferLeast * kBufferLeast;
    found.neighbours = int(number_of("C2CSERVE_MULTIPATH_NEIGHBOURS", found.neighbours));
    return found;
  }();
  return made;
}

}  // namespace c2c::multipath

// Returns what the program gets in place of a symbol, null for the symbol itself.
extern "C" void* c2c_hook_of(void* handle, const char* name) {
  using namespace c2c::multipath;
  real_dlsym();
  if (name == nullptr || name[0] != 'c' || name[1] != 'u' || passing > 0) return nullptr;
  // Lookups in the global scope find the functions that this library exports.
  if (handle == RTLD_DEFAULT || handle == RTLD_NEXT) return nullptr;
  void* const hook = hook_named(name);
  if (hook == nullptr) return nullptr;
  void* const found = c2c_real_dlsym(handle, name);
  if (found == nullptr || found != real(name)) return nullptr;  // not of CUDA's driver
  note_hook();
  return hook;
}

// A jump, not a call: the C library tells by the return address who asks, for RTLD_NEXT.
#if defined(__x86_64__)
asm(R"(
  .text
  .globl dlsym
  .type dlsym, @function
dlsym:
  pushq %rdi
  pushq %rsi
  subq $8, %rsp
  call c2c_hook_of
  addq $8, %rsp
  popq %rsi
  popq %rdi
  testq %rax, %rax
  jne 1f
  jmp *c2c_real_dlsym(%rip)
1:
  ret
  .size dlsym, .-dlsym
)");
#elif defined(__aarch64__)
asm(R"(
  .text
  .globl dlsym
  .type dlsym, %function
dlsym:
  stp x29, x30, [sp, #-32]!
  stp x0, x1, [sp, #16]
  bl c2c_hook_of
  mov x16, x0
  ldp x0, x1, [sp, #16]
  ldp x29, x30, [sp], #32
  cbz x16, 1f
  mov x0, x16
  ret
1:
  adrp x16, c2c_real_dlsym
  ldr x16, [x16, :lo12:c2c_real_dlsym]
  br x16
  .size dlsym, .-dlsym
)");
#else
#error "dlsym has to be written for this processor"
#endif
