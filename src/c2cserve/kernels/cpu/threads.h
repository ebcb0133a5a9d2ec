// A small pool of threads for one slice: static, pinned, spinning briefly before it sleeps.
// OpenMP is not used because torch brings its own runtime, and two of them fight for the cores.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "trace.h"

namespace c2c {

// Memory that is kept from call to call, unless it is so much that only a long prompt needs it. It
// starts a cache line: vectors that straddle two lines cost two loads.
class Scratch {
 public:
  float* room(int64_t n) {
    if (n > size_ || size_ > kKeep) {
      data_.reset();
      data_.reset(new (kLine) float[size_t(n)]);  // not cleared
      size_ = n;
    }
    return data_.get();
  }

 private:
  static constexpr int64_t kKeep = (64 << 20) / sizeof(float);
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(float* data) const { operator delete[](data, kLine); }
  };
  std::unique_ptr<float[], Free> data_;
  int64_t size_ = 0;
};

class ThreadPool {
 public:
  // `threads` in all, the caller's included. Helper i is pinned to cpus[i + 1] if given. A caller
  // that is found on a helper's CPU moves to cpus[0].
  ThreadPool(int threads, const int* cpus, int cpu_count);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return int(helpers_.size()) + 1; }

  // Room for `n` floats; what it held before is lost. `scratch` is `linear`'s. `between` is that of two
  // products, and of a prompt's keys and values. `workspace` holds the activations of a layer.
  float* scratch(int64_t n) { return scratch_.room(n); }
  float* between(int64_t n) { return between_.room(n); }
  float* workspace(int64_t n) { return workspace_.room(n); }

  // For benchmarks: tiles read copies of w also where they need none. The bits are the same.
  bool copies_strips = false;
  // Of the calls that are shared out. It is changed between calls.
  std::unique_ptr<Trace> trace;

  static constexpr int kPartsMax = 1024;
  static constexpr int64_t kWorthHelpers = 30'000;  // operations of rows: waking helpers takes longer

  // While one lives, calls follow each other closely, and helpers that wait do not sleep.
  class Awake {
   public:
    explicit Awake(ThreadPool& pool) : pool_(pool) { pool_.awake_ = true; }
    ~Awake() { pool_.awake_ = false; }
    Awake(const Awake&) = delete;
    Awake& operator=(const Awake&) = delete;

   private:
    ThreadPool& pool_;
  };

  // Call body(part, parts) for every part (at most kPartsMax) and wait. One caller at a time.
  template <typename Body>
  void run(int parts, const Body& body) {
    if (parts <= 1 || helpers_.empty()) {
      for (int part = 0; part < (parts < 1 ? 1 : parts); ++part) body(part, parts < 1 ? 1 : parts);
      return;
    }
    dispatch(parts, [](const void* f, int part, int all) {
      (*static_cast<const Body*>(f))(part, all);
    }, &body);
  }

  // Call body(task) for every task, each as soon as a thread is free.
  template <typename Body>
  void each(int64_t tasks, const Body& body) {
    run(int(tasks < kPartsMax ? tasks : kPartsMax), [&](int part, int all) {
      for (int64_t i = part; i < tasks; i += all) body(i);
    });
  }

  // Call body(row) for every row; one costs about `per_row` operations. What is done sooner than a
  // helper wakes up stays here.
  template <typename Body>
  void rows(int64_t count, int64_t per_row, const Body& body) {
    run(count * per_row < kWorthHelpers ? 1 : size(), [&](int part, int all) {
      for (int64_t i = count * part / all; i < count * (part + 1) / all; ++i) body(i);
    });
  }

 private:
  using Call = void (*)(const void*, int, int);

  static constexpr size_t kLine = 64;

  struct alignas(kLine) Taken {
    std::atomic<uint64_t> generation{0};
  };

  void dispatch(int parts, Call call, const void* body);
  void serve(int thread, int cpu);
  void leave_helpers_cpu() const;
  void take_own(int thread, int part, uint64_t ticket);
  void take_shared(int thread);
  void run_part(int thread, int part, int parts);

  Scratch scratch_, between_, workspace_;
  std::vector<std::thread> helpers_;
  std::vector<int> cpus_;  // the caller's own, then those that helpers are pinned to
  const int threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  // [generation | parts | next part]: one word, so that a late helper cannot mistake the parts of
  // the next call for its own. The caller waits for parts, never for helpers. So a helper that the
  // system has descheduled delays nothing.
  //
  // Parts of a call that has no more of them than threads belong to one thread each. It takes its part
  // in a line of its own, because 16 threads that change one line need 2 us. The caller takes those
  // that no thread has begun. Parts of a larger call are taken one after another by `next part`.
  //
  // Helpers that wait read the ticket all the time. So parts that are done are counted in another
  // line: else each count would take the line from all of them.
  alignas(kLine) std::atomic<uint64_t> ticket_{0};
  alignas(kLine) std::atomic<int> done_{0};
  alignas(kLine) std::atomic<bool> stop_{false};
  alignas(kLine) std::atomic<bool> awake_{false};
  std::vector<Taken> taken_;  // of each thread: the last call whose part is taken
  Call call_ = nullptr;
  const void* body_ = nullptr;
};

}  // namespace c2c
