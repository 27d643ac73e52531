// The memory through which the ranks of a group agree: one control block, mapped by all. All zeros is a fresh one.
//
// A collective is a row of rounds, one for each window of its bytes; rounds are numbered through the life of the group,
// equally on every rank. A round uses entry `number % kRing` of every table, and kSlots windows of staging in turn.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "waiting.h"

namespace elastic {

constexpr uint64_t kWindow = 512 << 10;  // bytes of a round
constexpr uint64_t kChunk = 64 << 10;    // bytes that one rank reduces at a time: with its sources they fit into a core's cache
constexpr uint64_t kRing = 64;           // rounds that a rank may be ahead of another
constexpr int kMismatchWords = 5;
constexpr uint64_t kSlots = 4;           // the same where staging is used

static_assert(std::atomic<uint64_t>::is_always_lock_free, "other processes see these words");

struct Offer {  // what a rank says of a round; written before `ready` counts it
  uint64_t signature;  // of the collective: equal on all ranks that call the same
  uint64_t offset;     // where this rank's window lies in its arena
  uint64_t result;     // of a reduction: where its result goes, also in its arena
};

struct alignas(128) Seat {  // of one rank; nobody else writes it
  std::atomic<uint64_t> ready;    // rounds in which its data is in place
  std::atomic<uint64_t> taken;    // rounds that it is through with: it reads nobody's memory for them any more
  std::atomic<uint32_t> writing;  // it may be writing into others' memory
  std::atomic<uint32_t> blocked;  // it has something to offer, and waits until the others have taken more
  Offer offers[kRing];
  uint64_t mismatch[kMismatchWords];  // written before `status` says kMismatch of this rank: see elastic_mismatch
};

struct alignas(64) Tally {  // of a round's chunks; both only grow, by the number of chunks in each use of the entry
  std::atomic<uint64_t> claimed;
  std::atomic<uint64_t> finished;
};

struct Control {
  alignas(64) std::atomic<uint64_t> status;  // see elastic_status
  alignas(64) Bell bell;
  Tally tallies[kRing];
  Seat seats[1];  // as many as there are ranks
};

inline size_t control_bytes(int32_t size) { return sizeof(Control) + sizeof(Seat) * static_cast<size_t>(size - 1); }

constexpr uint64_t kAborted = 1, kGone = 2, kLate = 3, kOther = 4, kMismatch = 5;  // reasons in `status`

}  // namespace elastic
