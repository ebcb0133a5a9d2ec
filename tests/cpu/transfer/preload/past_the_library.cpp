// Uses CUDA in a way that the library does not see: it asks for a symbol of a certain version.
#include <dlfcn.h>
#include <stdlib.h>

int main() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (driver == nullptr) return 2;
  // Another function of the C library's, which is not hooked.
  auto init = reinterpret_cast<int (*)(unsigned)>(dlvsym(driver, "cuInit", "libcuda.so.1"));
  if (init == nullptr) return 3;
  const int result = init(0);
  exit(result);
}
