// When threads begin and end their parts of the pool's calls, for benchmarks.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

namespace c2c {

class Trace {
 public:
  // Room for so many calls. Later ones are not recorded.
  Trace(int threads, int64_t calls) : width_(kHead + 2 * threads), rows_(size_t(calls * width_)) {}

  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  void begin(int parts) {
    if ((recording_ = size_t((count_ + 1) * width_) <= rows_.size())) {
      int64_t* row = rows_.data() + count_++ * width_;
      row[0] = parts;
      row[1] = now();
    }
  }
  void end() {
    if (recording_) last()[2] = now();
  }

  void part_ends(int thread, int64_t began) {
    if (!recording_) return;
    int64_t* times = last() + kHead + 2 * thread;
    if (times[0] == 0) times[0] = began;
    times[1] = now();
  }

  int64_t count() const { return count_; }
  // [call]: parts, begin, end, and each thread's begin and end, in nanoseconds; zeros if it took none.
  void copy(int64_t* out) const { std::copy_n(rows_.data(), count_ * width_, out); }

 private:
  static constexpr int64_t kHead = 3;

  int64_t* last() { return rows_.data() + (count_ - 1) * width_; }

  const int64_t width_;
  std::vector<int64_t> rows_;
  int64_t count_ = 0;
  bool recording_ = false;
};

}  // namespace c2c
