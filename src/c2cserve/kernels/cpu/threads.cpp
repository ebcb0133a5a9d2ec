#include "threads.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
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

constexpr uint64_t generation(uint64_t ticket) { return ticket >> 32; }
constexpr int parts(uint64_t ticket) { return int(ticket >> 16 & 0xffff); }
constexpr int next(uint64_t ticket) { return int(ticket & 0xffff); }

}  // namespace

ThreadPool::ThreadPool(int threads, const int* cpus, int cpu_count)
    : cpus_(cpus, cpus + std::clamp(cpu_count, 0, threads)) {
  for (int i = 1; i < threads; ++i)
    helpers_.emplace_back(&ThreadPool::serve, this, i < cpu_count ? cpus[i] : -1);
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    ticket_.fetch_add(uint64_t(1) << 32);
  }
  wake_.notify_all();
  for (auto& helper : helpers_) helper.join();
}

void ThreadPool::work() {
  while (true) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    if (next(ticket) >= parts(ticket)) return;
    // Never tried again, however many threads take parts at once. Each thread may count one part
    // too many, which the field has room for.
    ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
    if (next(ticket) >= parts(ticket)) return;
    // The caller cannot continue before this part is done, so call_ and body_ do not change.
    call_(body_, next(ticket), parts(ticket));
    done_.fetch_add(1, std::memory_order_release);
  }
}

// The system may wake a caller that is allowed several CPUs on that of a helper. Both would take
// turns there, for many milliseconds, while the caller's own is idle.
void ThreadPool::leave_helpers_cpu() const {
  if (cpus_.size() < 2) return;
  const int here = sched_getcpu();
  if (here == cpus_[0] || std::find(cpus_.begin(), cpus_.end(), here) == cpus_.end()) return;
  cpu_set_t allowed, own;
  const pthread_t self = pthread_self();
  CPU_ZERO(&own);
  CPU_SET(cpus_[0], &own);
  if (pthread_getaffinity_np(self, sizeof(allowed), &allowed) != 0) return;
  if (!CPU_ISSET(cpus_[0], &allowed) || pthread_setaffinity_np(self, sizeof(own), &own) != 0) return;
  pthread_setaffinity_np(self, sizeof(allowed), &allowed);
}

void ThreadPool::dispatch(int count, Call call, const void* body) {
  leave_helpers_cpu();
  call_ = call;
  body_ = body;
  done_.store(0, std::memory_order_relaxed);
  {
    // Under the lock, or a helper that is about to sleep could miss it.
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t before = ticket_.load(std::memory_order_relaxed);
    ticket_.store((generation(before) + 1) << 32 | uint64_t(count) << 16,
                  std::memory_order_release);
  }
  wake_.notify_all();
  work();
  // A helper that lost its core in the middle of a part may need this one to get on.
  const auto until = std::chrono::steady_clock::now() + kSpin;
  while (done_.load(std::memory_order_acquire) != count) {
    if (std::chrono::steady_clock::now() < until)
      relax();
    else
      std::this_thread::yield();
  }
}

void ThreadPool::serve(int cpu) {
  if (cpu >= 0) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
  }
  uint64_t seen = 0;
  auto fresh = [&] { return generation(ticket_.load(std::memory_order_acquire)) != seen; };
  while (true) {
    auto until = std::chrono::steady_clock::now() + kSpin;
    while (!fresh() && std::chrono::steady_clock::now() < until) relax();
    if (!fresh()) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, fresh);
    }
    seen = generation(ticket_.load(std::memory_order_acquire));
    if (stop_) return;
    work();
  }
}

}  // namespace c2c
