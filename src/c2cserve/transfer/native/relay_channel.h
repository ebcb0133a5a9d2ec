// Memory that two processes share: one has micro-tasks, the other's GPU relays them.
//
//     client    slot: pieces, submitted = n, wake      recalled = n?             looks at done
//     server                        chunk by chunk: begun + 1, copies ... done = n
//     its GPU                                           after each chunk: moved + 1
//
// The server counts a chunk as begun before it looks for a recall, and the client recalls before it
// looks at what was begun. So one of the two sees the other. When all chunks that were begun have
// moved, a recalled micro-task writes nothing more. The server's GPU counts what has moved, so that
// is seen while the server's process stands still, too.
#pragma once
#include <stdint.h>

#include "relay_kernel.h"

namespace c2c::transfer {

constexpr int kChannelSlots = 16;  // the largest depth
constexpr int kStageLanes = 3;     // of the server: chunks that are under way at a time
constexpr size_t kApart = 128;     // processors and GPUs that write one word transfer no other

struct ChannelSlot {
  alignas(kApart) uint32_t recalled;  // by the client: this micro-task writes nothing more
  alignas(kApart) uint32_t begun;     // by the server: chunks, ever
  uint32_t done;                      // by the server: the last micro-task that is over
  uint32_t failed;                    // by the server: the micro-task that failed
  alignas(kApart) uint32_t moved[kStageLanes];  // by the GPU: chunks of each lane, ever
  alignas(kApart) uint32_t submitted;  // by the client: the last micro-task, of the pieces below
  uint32_t pieces;
  Piece piece[kRelayPieces];  // addresses are the server's
};

struct Channel {
  alignas(kApart) uint32_t posted;  // by the client: how many; the server sleeps on it
  // By the server, which takes nothing new meanwhile: its engine has transfers of its own, and its
  // steps read over its link.
  alignas(kApart) uint32_t moving;
  uint32_t streaming;
  ChannelSlot slot[kChannelSlots];
};

constexpr size_t kChannelBytes = (sizeof(Channel) + 4095) / 4096 * 4096;  // whole pages

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

inline uint32_t read(const uint32_t& word) { return __atomic_load_n(&word, __ATOMIC_SEQ_CST); }
inline void write(uint32_t& word, uint32_t value) {
  __atomic_store_n(&word, value, __ATOMIC_SEQ_CST);
}

}  // namespace c2c::transfer
