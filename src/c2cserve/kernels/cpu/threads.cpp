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

// Bits of the next part and of the number of parts. The others count calls, for years.
constexpr int kNextBits = 12, kPartsBits = 12;
constexpr uint64_t generation(uint64_t ticket) { return ticket >> (kNextBits + kPartsBits); }
constexpr int parts(uint64_t ticket) {
  return int(ticket >> kNextBits & ((1 << kPartsBits) - 1));
}
constexpr int next(uint64_t ticket) { return int(ticket & ((1 << kNextBits) - 1)); }
constexpr uint64_t ticket_of(uint64_t generation, int parts) {
  return generation << (kNextBits + kPartsBits) | uint64_t(parts) << kNextBits;
}

}  // namespace

ThreadPool::ThreadPool(int threads, const int* cpus, int cpu_count)
    : cpus_(cpus, cpus + std::clamp(cpu_count, 0, threads)),
      threads_(threads),
      taken_(size_t(threads)) {
  for (int i = 1; i < threads; ++i)
    helpers_.emplace_back(&ThreadPool::serve, this, i, i < cpu_count ? cpus[i] : -1);
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    ticket_ = ticket_of(generation(ticket_) + 1, 0);
  }
  wake_.notify_all();
  for (auto& helper : helpers_) helper.join();
}

// The caller cannot continue before a part that is taken is done, so call_ and body_ do not change.
void ThreadPool::run_part(int thread, int part, int parts) {
  const int64_t began = trace ? Trace::now() : 0;
  call_(body_, part, parts);
  if (trace) trace->part_ends(thread, began);
  done_.fetch_add(1, std::memory_order_release);
}

// A part that belongs to one thread, if it is not taken. A helper may be late, and ask with the
// ticket of a call that is over: then its part was taken in that call or in a later one.
void ThreadPool::take_own(int thread, int part, uint64_t ticket) {
  const uint64_t now = generation(ticket);
  std::atomic<uint64_t>& taken = taken_[size_t(part)].generation;
  uint64_t before = taken.load(std::memory_order_relaxed);
  if (before < now && taken.compare_exchange_strong(before, now, std::memory_order_acq_rel))
    run_part(thread, part, parts(ticket));
}

void ThreadPool::take_shared(int thread) {
  while (true) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    if (parts(ticket) <= threads_ || next(ticket) >= parts(ticket)) return;
    // Never tried again, however many threads take parts at once. Each thread may count one part
    // too many, which the field has room for.
    ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
    if (parts(ticket) <= threads_ || next(ticket) >= parts(ticket)) return;
    run_part(thread, next(ticket), parts(ticket));
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
  if (trace) trace->begin(count);
  uint64_t ticket;
  {
    // Under the lock, or a helper that is about to sleep could miss it.
    std::lock_guard<std::mutex> lock(mutex_);
    ticket = ticket_of(generation(ticket_.load(std::memory_order_relaxed)) + 1, count);
    ticket_.store(ticket, std::memory_order_release);
  }
  wake_.notify_all();
  if (count <= threads_)
    for (int part = 0; part < count; ++part) take_own(0, part, ticket);
  else
    take_shared(0);
  // A helper that lost its core in the middle of a part may need this one to get on.
  const auto until = std::chrono::steady_clock::now() + kSpin;
  while (done_.load(std::memory_order_acquire) != count) {
    if (std::chrono::steady_clock::now() < until)
      relax();
    else
      std::this_thread::yield();
  }
  if (trace) trace->end();
}

void ThreadPool::serve(int thread, int cpu) {
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
    while (!fresh()) {
      if (std::chrono::steady_clock::now() < until)
        relax();
      else if (awake_.load(std::memory_order_relaxed))
        std::this_thread::yield();
      else
        break;
    }
    if (!fresh()) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, fresh);
    }
    const uint64_t ticket = ticket_.load(std::memory_order_acquire);
    seen = generation(ticket);
    if (stop_) return;
    if (parts(ticket) > threads_)
      take_shared(thread);
    else if (thread < parts(ticket))
      take_own(thread, thread, ticket);
  }
}

}  // namespace c2c
