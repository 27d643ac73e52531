// Waiting: futexes that are shared between processes, clocks, and whether a peer is alive. Allocates nothing. Linux
// only.
#pragma once

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace elastic {

inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

// Waits until the word is no longer `seen`, a wake-up or signal comes, or the time is over.
inline void futex_wait(std::atomic<uint32_t>* word, uint32_t seen, int64_t timeout_ns) {
  timespec timeout{timeout_ns / 1000000000, timeout_ns % 1000000000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

inline void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

inline void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A pidfd is readable once its process has ended, even if it has not been reaped.
inline bool has_ended(int pidfd) {
  if (pidfd < 0) return false;
  pollfd asked{pidfd, POLLIN, 0};
  return poll(&asked, 1, 0) == 1 && (asked.revents & (POLLIN | POLLHUP | POLLNVAL)) != 0;
}

// Wakes all sleepers. Costs nothing if no thread sleeps.
struct Bell {
  std::atomic<uint32_t> rung;
  std::atomic<uint32_t> sleepers;

  // After a sequentially consistent write of what the sleepers wait for: see `sleep`.
  void ring() {
    if (sleepers.load(std::memory_order_seq_cst) != 0) {
      rung.fetch_add(1, std::memory_order_seq_cst);
      futex_wake_all(&rung);
    }
  }

  // `worth` is called again after this thread counts as a sleeper, and reads in the single order of all such
  // operations: any later change rings. A process that is killed in its sleep stays counted, which causes unnecessary
  // wake-ups of the others until the group ends.
  template <typename Worth>
  void sleep(int64_t timeout_ns, Worth worth) {
    const uint32_t seen = rung.load(std::memory_order_seq_cst);
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (worth()) futex_wait(&rung, seen, timeout_ns);
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
};

}  // namespace elastic
