// Copies of 64 MiB by the runtime library: in and out, in a stream and without one.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

int main() {
  const size_t size = 64 << 20;
  char *host, *back, *gpu;
  cudaStream_t stream;
  cudaMallocHost(&host, size);
  cudaMallocHost(&back, size);
  cudaMalloc(&gpu, size);
  cudaStreamCreate(&stream);
  for (size_t i = 0; i < size; ++i) host[i] = char(i * 31 + i / 4096);
  int right = 0;
  cudaMemcpyAsync(gpu, host, size, cudaMemcpyHostToDevice, stream);
  cudaMemcpyAsync(back, gpu, size, cudaMemcpyDeviceToHost, stream);
  right += cudaStreamSynchronize(stream) == cudaSuccess;
  right += memcmp(host, back, size) == 0;
  memset(back, 0, size);
  for (size_t i = 0; i < size; ++i) host[i] += 1;
  right += cudaMemcpy(gpu, host, size, cudaMemcpyDefault) == cudaSuccess &&
           cudaMemcpy(back, gpu, size, cudaMemcpyDeviceToHost) == cudaSuccess;
  right += memcmp(host, back, size) == 0;
  int64_t counts[27] = {};
  auto count = reinterpret_cast<void (*)(int64_t*)>(dlsym(RTLD_DEFAULT, "c2c_multipath_counts"));
  if (count != nullptr) count(counts);
  printf("%d of 4 right, %d spread\n", right, int(counts[0]));
  return 0;
}
