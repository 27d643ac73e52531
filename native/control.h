// Memory through which the ranks of a group synchronize: one control block, mapped by all. It starts as zeros.
//
// A collective is a sequence of rounds, one for each window of its bytes. Rounds are numbered through the life of the
// group, equally on every rank. A round uses entry `number % kRing` of every table, and kSlots windows of staging in
// turn.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "waiting.h"

namespace elastic {

constexpr uint64_t kWindow = 512 << 10;  // bytes of a round
// bytes that one rank reduces at a time: with its sources they fit into a core's cache
constexpr uint64_t kChunk = 64 << 10;
constexpr uint64_t kRing = 64;           // rounds that a rank may be ahead of another
constexpr int kMismatchWords = 5;
constexpr uint64_t kSlots = 4;  // the same if staging is used

static_assert(std::atomic<uint64_t>::is_always_lock_free, "other processes see these words");

struct Offer {  // of one rank for one round; written before `ready` counts it
  uint64_t signature;  // of the collective: equal on all ranks that call the same
  uint64_t offset;  // offset of this rank's window in its arena
  uint64_t result;  // of a reduction: offset of its result, also in its arena
};

struct alignas(128) Seat {  // of one rank, which is the only writer
  std::atomic<uint64_t> ready;  // rounds in which its data is ready
  // rounds that it has completed: it no longer reads other memory for them
  std::atomic<uint64_t> taken;
  std::atomic<uint32_t> writing;  // it may be writing into others' memory
  // it has something to offer, and waits until the others have taken more
  std::atomic<uint32_t> blocked;
  Offer offers[kRing];
  // written before `status` is kMismatch for this rank: see elastic_mismatch
  uint64_t mismatch[kMismatchWords];
};

struct alignas(64) Tally {  // of a round's chunks; both only grow, by the number of chunks in each use of the entry
  std::atomic<uint64_t> claimed;
  std::atomic<uint64_t> finished;
};

struct Control {
  alignas(64) std::atomic<uint64_t> status;  // see elastic_status
  alignas(64) Bell bell;
  Tally tallies[kRing];
  Seat seats[1];  // one per rank
};

inline size_t control_bytes(int32_t size) { return sizeof(Control) + sizeof(Seat) * static_cast<size_t>(size - 1); }

constexpr uint64_t kAborted = 1, kGone = 2, kLate = 3, kOther = 4, kMismatch = 5;  // reasons in `status`

}  // namespace elastic
