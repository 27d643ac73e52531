// Messages between ranks: a byte ring for each pair of ranks, in the sender's staging. Never waits.
//
// A send is complete once the receiver has read all of it; the sender may leave then. A message without a receive stays
// in the lane; if there is a receive for a later one, it is kept in separate memory of the receiver. One thread at a
// time. A group has either collectives or messages: both use the staging.
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <vector>

#include "group.h"

namespace elastic {

constexpr int32_t kUnderWay = -1;

struct Message {  // a send or receive of this rank
  uint8_t* data = nullptr;
  uint64_t bytes = 0;
  int32_t peer = 0;  // -1: any source
  int64_t tag = 0;
  uint64_t type = 0;  // the caller's number for the type of its elements
  int32_t* state = nullptr;  // see elastic_send
  uint64_t moved = 0;  // of a header and the bytes, into a lane
  bool sends = false;
  uint64_t end = 0;  // its end in the lane, once it is there completely
};

class Lanes {
 public:
  Lanes(const elastic_options& options, uint64_t staging_bytes);

  // Accesses only this rank's memory, as `settle_read`: both are valid after the group has failed.
  void append(std::list<Message>& incoming);
  // Completes sends that their receivers have read. Returns whether it completed any.
  bool settle_read();
  bool pending() const { return !receives_.empty() || sending_ > 0 || receiving_ > 0; }
  // Moves a bounded amount into the lanes. Returns whether there was any; waiting ranks must then be woken.
  bool send_some();
  // Moves received data; only a waiting sender must be woken then. Writes into others' memory, so the caller must mark
  // that.
  bool receive_some(bool* wake);
  // A message of another size or type than its receive; `source` -1: none. Nothing is received after it.
  struct Mismatch {
    int source = -1;
    uint64_t sent_bytes = 0, sent_type = 0, room_bytes = 0, room_type = 0;
  };
  const Mismatch& mismatch() const { return mismatch_; }
  // The first of these ranks that something here waits for, or for a message of any source if they include all others;
  // -1: none.
  int awaited(uint64_t among) const;

 private:
  struct Lane;
  struct Kept {  // a message without a receive so far
    int source;
    int64_t tag;
    uint64_t type, bytes;
    std::unique_ptr<uint8_t[]> data;
    bool whole = false;
  };
  struct Arrival {  // at the head of a lane
    bool begun = false;
    uint64_t bytes = 0, moved = 0;
    std::list<Message> into;  // its receive; or none yet:
    Kept* kept = nullptr;
  };

  Lane& lane(int from, int to) const;
  bool send_one(std::list<Message>& queue, int to);
  bool receive_one(int source, bool* wake);
  bool begin(Arrival& arrival, int source, int64_t tag, uint64_t type, uint64_t bytes);
  bool fits(int source, uint64_t type, uint64_t bytes, const Message& receive);
  bool take_kept(const Message& receive);

  int rank_, size_;
  uint64_t room_;  // bytes of a lane
  std::vector<uint8_t*> staging_;
  std::vector<std::list<Message>> sends_;  // by receiver; also those in a lane until they are read:
  std::vector<std::list<Message>> unread_;
  std::list<Message> receives_;  // without a message so far, in the order of the calls
  std::vector<Arrival> arrivals_;          // by sender
  std::list<Kept> kept_;  // in the order of arrival
  std::vector<uint64_t> written_, read_;   // of the lanes to and from each rank
  size_t sending_ = 0, receiving_ = 0;
  Mismatch mismatch_;
  int turn_ = 0;
};

}  // namespace elastic
