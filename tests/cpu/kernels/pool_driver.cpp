// Calls of a thread pool, one after another: each part must run exactly once, before the call returns.
//
//   pool_driver THREADS CALLS SEED      prints the number of parts, or what went wrong
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>

#include "threads.h"

int main(int, char** argv) {
  const int threads = std::atoi(argv[1]), calls = std::atoi(argv[2]);
  std::mt19937 random(unsigned(std::atoi(argv[3])));
  c2c::ThreadPool pool(threads, nullptr, 0);
  std::vector<int> runs(c2c::ThreadPool::kPartsMax);  // of each part; not atomic, as results are not
  int64_t total = 0;
  std::optional<c2c::ThreadPool::Awake> awake;
  for (int call = 0; call < calls; ++call) {
    const int kind = int(random() % 8);
    const int parts = 1 + int(random() % unsigned(kind ? threads : 4 * threads));
    if (random() % 64 == 0) awake.emplace(pool);
    if (random() % 64 == 0) awake.reset();
    if (random() % 256 == 0) std::this_thread::sleep_for(std::chrono::microseconds(120));
    std::fill_n(runs.begin(), parts, 0);
    pool.run(parts, [&](int part, int all) {
      if (all != parts) std::abort();
      ++runs[size_t(part)];
      for (volatile int i = 0; i < (part * 7 + call) % 400; i = i + 1) {
      }
    });
    for (int part = 0; part < parts; ++part)
      if (runs[size_t(part)] != 1)
        return std::printf("call %d: part %d of %d ran %d times\n", call, part, parts, runs[part]), 1;
    total += parts;
  }
  std::printf("%ld\n", long(total));
}
