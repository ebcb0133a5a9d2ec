#include "threads.h"

#include <pthread.h>
#include <sched.h>

#include <chrono>

namespace c2c {
namespace {

constexpr auto kSpin = std::chrono::microseconds(40);

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads, const int* cpus, int cpu_count) {
  for (int i = 1; i < threads; ++i)
    helpers_.emplace_back(&ThreadPool::serve, this, i, i < cpu_count ? cpus[i] : -1);
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    generation_.fetch_add(1);
  }
  wake_.notify_all();
  for (auto& helper : helpers_) helper.join();
}

void ThreadPool::work() {
  for (int part; (part = next_.fetch_add(1, std::memory_order_relaxed)) < parts_;)
    call_(body_, part, parts_);
}

void ThreadPool::dispatch(int parts, Call call, const void* body) {
  parts_ = parts;
  call_ = call;
  body_ = body;
  next_.store(0, std::memory_order_relaxed);
  busy_.store(int(helpers_.size()), std::memory_order_relaxed);
  {
    // Under the lock, or a helper that is about to sleep could miss it.
    std::lock_guard<std::mutex> lock(mutex_);
    generation_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  work();
  while (busy_.load(std::memory_order_acquire) != 0) relax();
}

void ThreadPool::serve(int index, int cpu) {
  (void)index;
  if (cpu >= 0) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
  }
  uint64_t seen = 0;
  while (true) {
    auto until = std::chrono::steady_clock::now() + kSpin;
    while (generation_.load(std::memory_order_acquire) == seen &&
           std::chrono::steady_clock::now() < until)
      relax();
    if (generation_.load(std::memory_order_acquire) == seen) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
    }
    seen = generation_.load(std::memory_order_acquire);
    if (stop_) return;
    work();
    busy_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace c2c
