// The rounds of a group, in order: offers windows, reduces chunks that all have offered, takes results. Never waits.
//
// Every chunk of a reduction is claimed by the first rank and is written exactly once, into every rank's memory: a rank
// without a core delays the others only in the middle of a chunk. One thread at a time, except for `fail`, `failed` and
// `status`.
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "control.h"
#include "group.h"
#include "kernels.h"

namespace elastic {

enum class Kind : uint32_t { kReduce, kReduceShares, kReduceTree, kSpreadShares, kBroadcast, kAllgather, kAlltoall, kBarrier };

struct Collective {
  uint64_t ticket = 0;
  Kind kind = Kind::kBarrier;
  uint64_t signature = 0;
  uint64_t bytes = 0;  // of one rank's buffer
  uint64_t windows = 1;
  uint64_t offered = 0;  // windows
  uint64_t taken = 0;
  bool in_place = false;
  // the result is written directly to its destination, although the input goes through staging
  bool lands = false;
  // reductions
  uint8_t* data = nullptr;  // the result; also source and destination of a broadcast
  DType dtype = DType::kUint8;
  Reduce reduce = nullptr;
  Scale scale;
  SumTree sum_tree = nullptr;
  std::vector<Row> rows;  // of a tree
  uint64_t stride = 0;
  std::vector<uint64_t> reach;  // bytes of each rank from the begin of its buffer to its last place
  // moves
  int root = 0;
  const uint8_t* source = nullptr;  // also the input of an allreduce
  uint8_t* output = nullptr;
  std::vector<uint8_t*> outputs;
  std::vector<uint64_t> received, sent;
  bool sized = true;  // false: the number of windows is known after the first one
};

// Shares begin at whole cache lines; the last ones may be empty.
void share_of(uint64_t count, size_t element, int size, int rank, uint64_t* begin, uint64_t* end);

class Rounds {
 public:
  explicit Rounds(const elastic_options& options);

  int rank() const { return rank_; }
  int size() const { return size_; }
  Bell& bell() { return control()->bell; }
  bool owns(const void* data, uint64_t bytes) const;

  // A new collective. Signatures leave out the locations of the buffers, which may differ between ranks.
  Collective reduction(Kind kind, void* data, uint64_t count, int32_t dtype, int32_t op, Scale scale) const;
  Collective allreduce(const void* source, void* data, uint64_t count, int32_t dtype, int32_t op, Scale scale) const;
  // Sets `sense` to false if the program is invalid, or the buffers are not in the arena.
  Collective tree(void* data, uint64_t count, uint64_t stride, int32_t dtype, const int32_t* program, uint64_t length,
                  Scale scale, bool* sense) const;
  Collective broadcast(void* data, uint64_t bytes, int root) const;
  Collective allgather(void* const* outputs, const void* data, uint64_t bytes) const;
  Collective alltoall(void* output, const void* data, const uint64_t* received, const uint64_t* sent) const;
  Collective barrier() const;

  void append(std::list<Collective>& incoming);
  bool empty() const { return queue_.empty(); }
  uint64_t done() const { return done_; }  // newest ticket of which the collective is complete

  // Offers data that needs no copy.
  void offer_in_place();
  // Offers, reduces, takes: a bounded amount. Returns whether there was any. After a failure it only takes what all had
  // finished before.
  bool advance();

  int awaited() const;  // the rank that it waits for
  uint64_t missing() const;  // a bit for each rank that has not arrived
  uint64_t gone() const;  // a bit for each rank whose process has ended

  uint64_t status() const { return control()->status.load(std::memory_order_acquire); }
  bool failed() const { return status() != 0; }
  void fail(uint64_t reason, int rank);  // any thread; the first one counts
  void fail_mismatch(const uint64_t (&words)[kMismatchWords]);  // of a message that this rank receives
  void mismatch(uint64_t* words) const;

  void stop() { stopped_ = true; }  // nothing is read or written any more
  bool stopped() const { return stopped_; }
  // Around writes into others' memory. False: the group has failed, and nothing may be written.
  bool begin_writing();
  void end_writing() { seat(rank_).writing.store(0, std::memory_order_release); }
  bool written_by_others() const;
  // After `stop`: switches to a private copy of the control block. False: no memory for it.
  bool detach();

 private:
  struct Round {
    Collective* collective;
    uint64_t window;
    uint64_t first, end;  // of its chunks, in the entry's tally
    bool checked;  // all ranks have offered the same
  };

  bool offer(bool only_in_place);
  bool may_offer(const Collective& collective);
  void offer_window(Collective& collective);
  bool reduce_some();
  bool take_one();
  bool agrees(const Collective& collective, uint64_t window, uint64_t number, int rank);
  int odd_one(uint64_t number, int differs) const;
  bool check(Round& round, uint64_t number);
  void run_chunk(const Round& round, uint64_t number, uint64_t chunk);
  bool move(Round& round, uint64_t number);
  void learn_sizes(Collective& collective, uint64_t number);
  static bool reduces(const Collective& collective) { return collective.kind <= Kind::kSpreadShares; }
  bool all_ready(uint64_t number) const;
  uint64_t least_taken() const;
  uint64_t length(const Collective& collective, uint64_t window) const;
  // of a slot, for one rank's rows
  uint64_t part() const { return kWindow / static_cast<uint64_t>(size_) / 64 * 64; }
  Control* control() const { return control_.load(std::memory_order_seq_cst); }
  Seat& seat(int rank) const { return control()->seats[rank]; }
  Offer& offer_of(int rank, uint64_t number) const { return seat(rank).offers[number % kRing]; }
  uint8_t* staged(int rank, uint64_t number) const { return arenas_[rank] + staging_[rank] + number % kSlots * kWindow; }

  int rank_, size_;
  Control* const shared_;
  std::atomic<Control*> control_;  // the shared one, until detached
  std::unique_ptr<uint8_t[]> own_;  // memory of the private one
  std::vector<uint8_t*> arenas_;
  std::vector<uint64_t> arena_bytes_, staging_;
  std::vector<int> pidfds_;
  std::list<Collective> queue_;
  std::list<Collective>::iterator offering_;  // the first with windows to offer
  Round ring_[kRing];
  uint64_t expected_[kRing] = {};  // chunks counted so far in each entry
  // number of rounds that this rank has offered, completely claimed, and taken
  uint64_t offered_ = 0, reduced_ = 0, taken_ = 0;
  uint64_t done_ = 0;
  bool stopped_ = false;
};

}  // namespace elastic
