// one_copy WHAT...: large copies, one for each word, on GPU 0. Prints for each how many copies of
// the library's counts it adds, by reason, and whether the bytes arrived.
#include <dlfcn.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <string>

#include "driver.h"

namespace {

constexpr size_t kSize = 1 << 20;
constexpr int kReasons = 13, kMany = 40;
struct Counts {
  int64_t copies[kReasons], bytes[kReasons], relayed;
};

Counts counts() {
  Counts found{};
  void* const library = dlsym(RTLD_DEFAULT, "c2c_multipath_counts");
  const auto count = reinterpret_cast<void (*)(Counts*)>(library);
  if (count != nullptr) count(&found);
  return found;
}

struct Memory {
  uint64_t pinned, gpu, other_gpu, managed, mapped, registered;
  char* pageable = static_cast<char*>(calloc(1, kSize));
  void *stream, *first, *second;

  Memory() {
    CHECK(cuDevicePrimaryCtxRetain(&second, 1));
    CHECK(cuCtxSetCurrent(second));
    CHECK(cuMemAlloc_v2(&other_gpu, kSize));
    CHECK(cuDevicePrimaryCtxRetain(&first, 0));
    CHECK(cuCtxSetCurrent(first));
    CHECK(cuMemAlloc_v2(&gpu, kSize));
    CHECK(cuMemAllocHost_v2(&pinned, kSize));
    CHECK(cuMemAllocManaged(&managed, kSize, 1));
    CHECK(fake_map(&mapped, kSize, 0));
    CHECK(fake_register(&registered, kSize));
    CHECK(cuStreamCreateWithPriority(&stream, 1, 0));
  }
};

// Returns where the bytes should be.
uint64_t copy(Memory& m, const std::string& what) {
  void* pinned = reinterpret_cast<void*>(m.pinned);
  if (what == "in") {
    CHECK(cuMemcpyHtoDAsync_v2(m.gpu, pinned, kSize, m.stream));
  } else if (what == "out") {
    CHECK(cuMemcpyHtoD_v2(m.gpu, pinned, kSize));
    CHECK(cuMemcpyDtoHAsync_v2(m.pageable, m.gpu, 100, m.stream));
    memset(pinned, 0, kSize);
    CHECK(cuMemcpyDtoHAsync_v2(pinned, m.gpu, kSize, m.stream));
  } else if (what == "odd") {  // the addresses differ modulo 16
    CHECK(cuMemcpyHtoDAsync_v2(m.gpu + 5, pinned, kSize - 5, m.stream));
    CHECK(cuMemcpyHtoDAsync_v2(m.gpu, pinned, 5, m.stream));
  } else if (what == "many") {
    for (int i = 0; i < kMany; ++i) CHECK(cuMemcpyHtoDAsync_v2(m.gpu, pinned, kSize, m.stream));
  } else if (what == "held") {  // the stream waits for this thread, which asks for more first
    static std::atomic<int> asked{0};
    CHECK(fake_hold(m.stream, &asked));
    for (int i = 0; i < kMany; ++i) CHECK(cuMemcpyHtoDAsync_v2(m.gpu, pinned, kSize, m.stream));
    asked = 1;
  } else if (what == "small") {
    CHECK(cuMemcpyHtoDAsync_v2(m.gpu, pinned, 1000, m.stream));
  } else if (what == "now") {
    CHECK(cuMemcpy(m.gpu, m.pinned, kSize));
    return m.gpu;
  } else if (what == "mapped") {
    CHECK(cuMemcpyHtoDAsync_v2(m.mapped, pinned, kSize, m.stream));
    CHECK(cuStreamSynchronize(m.stream));
    return m.mapped;
  } else if (what == "pageable") {
    CHECK(cuMemcpyHtoDAsync_v2(m.gpu, memcpy(m.pageable, pinned, kSize), kSize, m.stream));
  } else if (what == "managed") {
    CHECK(cuMemcpyAsync(m.managed, m.pinned, kSize, m.stream));
    CHECK(cuStreamSynchronize(m.stream));
    return m.managed;
  } else if (what == "registered") {
    memcpy(reinterpret_cast<void*>(m.registered), pinned, kSize);
    CHECK(cuMemcpyHtoDAsync_v2(m.gpu, reinterpret_cast<void*>(m.registered), kSize, m.stream));
  } else if (what == "device") {
    CHECK(cuMemcpyHtoD_v2(m.gpu, pinned, 1000));
    CHECK(cuMemcpyAsync(m.other_gpu, m.gpu, kSize, m.stream));
  } else if (what == "elsewhere") {  // memory of another GPU than the stream's
    CHECK(cuMemcpyHtoDAsync_v2(m.other_gpu, pinned, kSize, m.stream));
    CHECK(cuStreamSynchronize(m.stream));
    return m.other_gpu;
  } else if (what == "context") {
    void* context = nullptr;
    CHECK(cuCtxCreate_fake(&context, 0));
    CHECK(cuMemcpyHtoD_v2(m.gpu, pinned, kSize));
    CHECK(cuCtxSetCurrent(m.first));
  } else if (what == "captured") {
    void* graph = nullptr;
    CHECK(cuStreamBeginCapture_v2(m.stream, 0));
    CHECK(cuMemcpyHtoDAsync_v2(m.gpu, pinned, kSize, m.stream));
    CHECK(cuStreamEndCapture(m.stream, &graph));
    CHECK(cuGraphLaunch(graph, m.stream));
  } else if (what == "peers") {  // what the program would see of its own access
    CHECK(cuCtxSetCurrent(m.second));
    const int results[] = {cuCtxDisablePeerAccess(m.first), cuCtxEnablePeerAccess(m.first, 0),
                           cuCtxEnablePeerAccess(m.first, 0), cuCtxDisablePeerAccess(m.first),
                           cuCtxDisablePeerAccess(m.first)};
    CHECK(cuCtxSetCurrent(m.first));
    for (int result : results) printf("%d ", result);
    printf("%d ", fake_peers());
    CHECK(cuMemcpyHtoDAsync_v2(m.gpu, pinned, kSize, m.stream));
  } else if (what == "reset") {
    CHECK(cuDevicePrimaryCtxReset_v2(0));
    CHECK(cuMemcpyHtoDAsync_v2(m.gpu, pinned, kSize, m.stream));
  } else if (what == "forked") {
    const pid_t child = fork();
    if (child == 0) {
      cuMemcpyHtoDAsync_v2(m.gpu, pinned, kSize, m.stream);
      _exit(int(counts().copies[10]));  // of forked children
    }
    int status = 0;
    waitpid(child, &status, 0);
    printf("%d ", WEXITSTATUS(status));
    CHECK(cuMemcpyHtoDAsync_v2(m.gpu, pinned, kSize, m.stream));
  } else if (what == "killed") {
    CHECK(cuMemcpyHtoDAsync_v2(m.gpu, pinned, kSize, m.stream));
    kill(getpid(), SIGKILL);
  } else {
    fprintf(stderr, "no such copy: %s\n", what.c_str());
    exit(2);
  }
  CHECK(cuStreamSynchronize(m.stream));
  return what == "out" ? m.pinned : what == "device" || what == "small" ? 0 : m.gpu;
}

}  // namespace

int main(int count, char** words) {
  CHECK(cuInit(0));
  Memory memory;
  for (int i = 1; i < count; ++i) {
    const Counts before = counts();
    memset(reinterpret_cast<void*>(memory.pinned), 17 + i, kSize);
    const uint64_t at = copy(memory, words[i]);
    const Counts after = counts();
    bool arrived = true;
    for (size_t k = 0; at != 0 && k < kSize; ++k)
      arrived &= reinterpret_cast<char*>(at)[k] == char(17 + i);
    printf("%s:", words[i]);
    for (int k = 0; k < kReasons; ++k)
      for (int64_t n = before.copies[k]; n < after.copies[k]; ++n) printf(" %d", k);
    printf("%s%s\n", after.relayed > before.relayed ? " relayed" : "", arrived ? "" : " WRONG");
  }
  fflush(stdout);
  exit(0);
}
