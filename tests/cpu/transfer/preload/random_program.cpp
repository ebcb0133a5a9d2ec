// random_program HOW SEED OPERATIONS: random copies and other work on two GPUs, from two threads.
//
// Prints a sum of all memory, and how many copies took several links. The sum depends on the
// arguments only, as everything that touches a buffer is ordered: in its stream, by events, or by
// waits of the host. HOW is how the copies' functions
// are found: linked, dlsym, or proc (cuGetProcAddress).
#include <dlfcn.h>
#include <string.h>
#include <unistd.h>

#include <random>
#include <string>
#include <thread>
#include <vector>

#include "driver.h"

namespace {

constexpr size_t kSize = 1 << 20;
constexpr int kStreams = 5, kBuffers = 4, kThreads = 2;

struct Copies {
  decltype(&cuMemcpyHtoDAsync_v2) in = cuMemcpyHtoDAsync_v2;
  decltype(&cuMemcpyDtoHAsync_v2) out = cuMemcpyDtoHAsync_v2;
  decltype(&cuMemcpyAsync) any = cuMemcpyAsync;
  decltype(&cuMemcpyHtoDAsync_v2) in_own = nullptr;  // with a default stream a thread
} copies;

void find_copies(const std::string& how) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  auto get = reinterpret_cast<decltype(&cuGetProcAddress_v2)>(dlsym(driver, "cuGetProcAddress_v2"));
  if (how == "dlsym") {
    copies.in = reinterpret_cast<decltype(copies.in)>(dlsym(driver, "cuMemcpyHtoDAsync_v2"));
    copies.out = reinterpret_cast<decltype(copies.out)>(dlsym(driver, "cuMemcpyDtoHAsync_v2"));
    copies.any = reinterpret_cast<decltype(copies.any)>(dlsym(driver, "cuMemcpyAsync"));
  }
  void* found = nullptr;
  CHECK(get("cuGetProcAddress", &found, 12000, 0, nullptr));
  get = reinterpret_cast<decltype(get)>(found);
  if (how == "proc") {
    CHECK(get("cuMemcpyHtoDAsync", reinterpret_cast<void**>(&copies.in), 3020, 0, nullptr));
    CHECK(get("cuMemcpyDtoHAsync", reinterpret_cast<void**>(&copies.out), 3020, 0, nullptr));
    CHECK(get("cuMemcpyAsync", reinterpret_cast<void**>(&copies.any), 4000, 0, nullptr));
  }
  CHECK(get("cuMemcpyHtoDAsync", reinterpret_cast<void**>(&copies.in_own), 7000, 2, nullptr));
}

struct Buffer {
  uint64_t at;
  int gpu;  // -1: pinned, -2: pageable
  void* last = nullptr;  // the event of the last operation
};

struct Work {  // a kernel: mixes bytes of a buffer
  uint64_t at;
  size_t size;
  uint8_t with;
};
void run(void* data) {
  Work* work = static_cast<Work*>(data);
  uint8_t* bytes = reinterpret_cast<uint8_t*>(work->at);
  uint8_t mixed = work->with;
  for (size_t i = 0; i < work->size; ++i) bytes[i] = mixed = uint8_t(mixed * 31 + bytes[i] + 7);
  delete work;
}

class Program {
 public:
  Program(int gpu, unsigned seed) : gpu_(gpu), random_(seed) {
    void* context = nullptr;
    CHECK(cuDevicePrimaryCtxRetain(&context, gpu));
    CHECK(cuCtxSetCurrent(context));
    streams_.push_back(nullptr);  // the default stream
    for (int i = 1; i < kStreams; ++i) {
      streams_.push_back(nullptr);
      CHECK(cuStreamCreateWithPriority(&streams_.back(), i % 2, i % 3 ? 0 : -5));
    }
    for (int i = 0; i < 3 * kBuffers; ++i) {
      Buffer buffer{0, i % 3 == 0 ? gpu : -1};
      if (i % 3 == 0 && i % 2) CHECK(cuMemAlloc_v2(&buffer.at, kSize));
      if (i % 3 == 0 && i % 2 == 0) CHECK(fake_map(&buffer.at, kSize, gpu));
      if (i % 3 == 1) CHECK(cuMemAllocHost_v2(&buffer.at, kSize));
      if (i % 3 == 2) {
        buffer.at = reinterpret_cast<uint64_t>(calloc(1, kSize));
        buffer.gpu = i < kBuffers ? -2 : -1;
        if (i >= kBuffers) CHECK(fake_register(&buffer.at, kSize));
      }
      CHECK(cuEventCreate(&buffer.last, 0));
      for (size_t at = 0; buffer.gpu < 0 && at < kSize; ++at)
        reinterpret_cast<uint8_t*>(buffer.at)[at] = uint8_t(random_());
      (buffer.gpu >= 0 ? of_gpu_ : of_host_).push_back(buffer);
    }
  }

  void work(int operations) {
    for (int i = 0; i < operations; ++i) one();
    CHECK(cuCtxSynchronize());
  }

  uint64_t sum() const {
    uint64_t found = 14695981039346656037ull;
    for (const auto* buffers : {&of_gpu_, &of_host_})
      for (const Buffer& one : *buffers)
        for (size_t at = 0; at < kSize; ++at)
          found = (found ^ reinterpret_cast<uint8_t*>(one.at)[at]) * 1099511628211ull;
    return found;
  }

 private:
  unsigned pick(unsigned most) { return unsigned(random_() % most); }

  void one() {
    Buffer& on_gpu = of_gpu_[pick(unsigned(of_gpu_.size()))];
    Buffer& on_host = of_host_[pick(unsigned(of_host_.size()))];
    void* stream = streams_[pick(kStreams)];
    const size_t most = pick(3) ? 4096 : kSize;
    const size_t size = 1 + pick(unsigned(most)), to = pick(unsigned(kSize - size + 1));
    size_t from = pick(unsigned(kSize - size + 1));
    if (pick(4)) from = from / 16 * 16 + to % 16 <= kSize - size ? from / 16 * 16 + to % 16 : to;
    const bool inward = pick(2);
    Buffer& target = inward ? on_gpu : on_host;
    Buffer& source = inward ? on_host : on_gpu;
    const unsigned what = pick(20);
    if (what < 12) return copy(target, source, target.at + to, source.at + from, size, stream);
    if (what < 15) return kernel(on_gpu, on_gpu.at + to, size, stream);
    if (what < 17) return copy_now(target, source, target.at + to, source.at + from, size);
    if (what == 17) return graph(target, source, target.at + to, source.at + from, size);
    if (what == 18) return host_writes(on_host, on_host.at + to, size);
    CHECK(cuStreamSynchronize(stream));
  }

  void before(void* stream, std::initializer_list<Buffer*> buffers) {
    for (Buffer* one : buffers) CHECK(cuStreamWaitEvent(stream, one->last, 0));
  }
  void after(void* stream, std::initializer_list<Buffer*> buffers) {
    for (Buffer* one : buffers) CHECK(cuEventRecord(one->last, stream));
  }

  void copy(Buffer& target, Buffer& source, uint64_t to, uint64_t from, size_t size, void* stream) {
    const bool own = stream == nullptr && target.gpu >= 0 && pick(2);
    void* real = own ? reinterpret_cast<void*>(2) : stream;
    before(real, {&target, &source});
    if (own)
      CHECK(copies.in_own(to, reinterpret_cast<void*>(from), size, nullptr));
    else if (pick(3) == 0)
      CHECK(copies.any(to, from, size, stream));
    else if (target.gpu >= 0)
      CHECK(copies.in(to, reinterpret_cast<void*>(from), size, stream));
    else
      CHECK(copies.out(reinterpret_cast<void*>(to), from, size, stream));
    after(real, {&target, &source});
  }

  void copy_now(Buffer& target, Buffer& source, uint64_t to, uint64_t from, size_t size) {
    for (Buffer* one : {&target, &source}) CHECK(cuEventSynchronize(one->last));
    if (pick(2))
      CHECK(cuMemcpy(to, from, size));
    else if (target.gpu >= 0)
      CHECK(cuMemcpyHtoD_v2(to, reinterpret_cast<void*>(from), size));
    else
      CHECK(cuMemcpyDtoH_v2(reinterpret_cast<void*>(to), from, size));
    // It is over: the host writes what comes next.
    if (target.gpu < 0) *reinterpret_cast<uint8_t*>(to) += 1;
  }

  void kernel(Buffer& buffer, uint64_t at, size_t size, void* stream) {
    before(stream, {&buffer});
    CHECK(cuLaunchHostFunc(stream, run, new Work{at, size, uint8_t(random_())}));
    after(stream, {&buffer});
  }

  void graph(Buffer& target, Buffer& source, uint64_t to, uint64_t from, size_t size) {
    void *captured = streams_[1], *launched = streams_[2 + pick(kStreams - 2)], *made = nullptr;
    CHECK(cuStreamBeginCapture_v2(captured, 0));
    CHECK(copies.any(to, from, size, captured));
    CHECK(cuStreamEndCapture(captured, &made));
    before(launched, {&target, &source});
    for (int i = 0; i < 2; ++i) CHECK(cuGraphLaunch(made, launched));
    after(launched, {&target, &source});
  }

  void host_writes(Buffer& buffer, uint64_t at, size_t size) {
    CHECK(cuEventSynchronize(buffer.last));
    memset(reinterpret_cast<void*>(at), int(pick(256)), size);
  }

  int gpu_;
  std::mt19937 random_;
  std::vector<void*> streams_;
  std::vector<Buffer> of_gpu_, of_host_;
};

}  // namespace

int main(int, char** arguments) {
  CHECK(cuInit(0));
  find_copies(arguments[1]);
  uint64_t sums[kThreads];
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([=, &sums] {
      Program program(i, unsigned(atoi(arguments[2]) * kThreads + i));
      program.work(atoi(arguments[3]) / kThreads);
      sums[i] = program.sum();
    });
  }
  for (auto& thread : threads) thread.join();
  printf("%016llx\n", static_cast<unsigned long long>(sums[0] ^ (sums[1] * 3)));
  struct {
    int64_t copies[32], rest[64];
  } counts{};
  const auto count = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "c2c_multipath_counts"));
  if (count != nullptr) count(&counts);
  printf("%lld\n", static_cast<long long>(counts.copies[0]));
  fflush(stdout);
  _exit(0);  // without the emulated driver's thread
}
