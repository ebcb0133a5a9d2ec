// Memory that two processes share: one has micro-tasks, the other's GPU relays them.
//
//     client    slot: pieces, submitted = n, wake          recalled = n?      looks at done
//     server                                  launches
//     its GPU                                          started = n ... done = n
//
// The server's GPU writes what the client waits for. So relays that have begun also end when the
// server's process stands still.
#pragma once
#include <stdint.h>

#include "relay_kernel.h"

namespace c2c::transfer {

constexpr int kChannelSlots = 16;  // the largest depth
constexpr size_t kApart = 128;     // processors and GPUs that write one word transfer no other

struct ChannelSlot {
  alignas(kApart) uint32_t recalled;   // by the client: this launch writes nothing more
  alignas(kApart) uint32_t started;    // by the GPU: the last launch of which a CTA has begun
  alignas(kApart) uint32_t done;       // by the GPU: the last launch that is over
  alignas(kApart) uint32_t failed;     // by the server: the launch that failed
  alignas(kApart) uint32_t submitted;  // by the client: the last launch whose pieces are below
  uint32_t pieces;
  Piece piece[kRelayPieces];  // addresses are the server's
};

struct Channel {
  alignas(kApart) uint32_t posted;  // by the client: how many were submitted; the server sleeps on it
  // By the server, which takes nothing new meanwhile: its engine has transfers of its own, and its
  // steps read over its link.
  alignas(kApart) uint32_t moving;
  uint32_t streaming;
  ChannelSlot slot[kChannelSlots];
};

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
