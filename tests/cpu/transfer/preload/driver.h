// The functions of CUDA's driver that the programs of these tests call.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <atomic>

extern "C" {
int cuInit(unsigned);
int cuDeviceGetCount(int*);
int cuDeviceGet(int*, int);
int cuDevicePrimaryCtxRetain(void**, int);
int cuDevicePrimaryCtxReset_v2(int);
int cuCtxCreate_fake(void**, int);
int cuCtxSetCurrent(void*);
int cuCtxSynchronize();
int cuCtxEnablePeerAccess(void*, unsigned);
int cuCtxDisablePeerAccess(void*);
int cuMemAlloc_v2(uint64_t*, size_t);
int cuMemAllocHost_v2(uint64_t*, size_t);
int cuMemAllocManaged(uint64_t*, size_t, unsigned);
int cuStreamCreateWithPriority(void**, unsigned, int);
int cuStreamSynchronize(void*);
int cuStreamWaitEvent(void*, void*, unsigned);
int cuStreamBeginCapture_v2(void*, int);
int cuStreamEndCapture(void*, void**);
int cuGraphLaunch(void*, void*);
int cuEventCreate(void**, unsigned);
int cuEventRecord(void*, void*);
int cuEventQuery(void*);
int cuEventSynchronize(void*);
int cuLaunchHostFunc(void*, void (*)(void*), void*);
int cuGetProcAddress_v2(const char*, void**, int, uint64_t, int*);
int cuMemcpy(uint64_t, uint64_t, size_t);
int cuMemcpyAsync(uint64_t, uint64_t, size_t, void*);
int cuMemcpyHtoD_v2(uint64_t, const void*, size_t);
int cuMemcpyDtoH_v2(void*, uint64_t, size_t);
int cuMemcpyHtoDAsync_v2(uint64_t, const void*, size_t, void*);
int cuMemcpyDtoHAsync_v2(void*, uint64_t, size_t, void*);
int fake_map(uint64_t*, size_t, int);
int fake_register(uint64_t*, size_t);
int fake_peers();
int fake_hold(void*, const std::atomic<int>*);
}

inline void check(int result, const char* call) {
  if (result == 0) return;
  fprintf(stderr, "%s: error %d\n", call, result);
  exit(3);
}
#define CHECK(CALL) check(CALL, #CALL)
