// Messages from one rank to another: a ring of bytes from each rank to each other, in the sender's staging. Never waits.
//
// A sender is through with a message once the receiver has read all of it: it may leave then. What nobody asks for stays in
// the lane; where somebody asks for one behind it, it is kept in memory of the receiver's own. One thread at a time. A group
// has either collectives or messages: both use the staging.
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <vector>

#include "group.h"

namespace elastic {

constexpr int32_t kUnderWay = -1;

struct Message {  // asked for here
  uint8_t* data = nullptr;
  uint64_t bytes = 0;
  int32_t peer = 0;  // -1: whoever sends first
  int64_t tag = 0;
  uint64_t type = 0;  // what the caller calls its elements
  int32_t* state = nullptr;  // see elastic_send
  uint64_t moved = 0;        // of a header and the bytes, into a lane
  bool sends = false;
  uint64_t end = 0;  // where it ends in the lane, once all of it lies there
};

class Lanes {
 public:
  Lanes(const elastic_options& options, uint64_t staging_bytes);

  // Touches nobody else's memory, as `settle_read`: both have a meaning after the group has failed.
  void append(std::list<Message>& incoming);
  // Is through with what its receivers have read. Whether there was any.
  bool settle_read();
  bool pending() const { return !receives_.empty() || sending_ > 0 || receiving_ > 0; }
  // Moves what there is room for: a bounded amount of it. Whether there was anything; then whoever waits has to be woken.
  bool send_some();
  // The same for what has come; only a sender that waits has to be woken then. Writes into others' memory, so the caller
  // says that it does.
  bool receive_some(bool* wake);
  // A message of other bytes or another type than its receive; `source` -1: none. Nothing is received after it.
  struct Mismatch {
    int source = -1;
    uint64_t sent_bytes = 0, sent_type = 0, room_bytes = 0, room_type = 0;
  };
  const Mismatch& mismatch() const { return mismatch_; }
  // One of these ranks for which something here waits, or for a message of anybody where all others are among them; -1: none.
  int awaited(uint64_t among) const;

 private:
  struct Lane;
  struct Kept {  // a message that nobody had asked for yet
    int source;
    int64_t tag;
    uint64_t type, bytes;
    std::unique_ptr<uint8_t[]> data;
    bool whole = false;
  };
  struct Arrival {  // at the head of a lane
    bool begun = false;
    uint64_t bytes = 0, moved = 0;
    std::list<Message> into;  // the receive that takes it; or none yet:
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
  std::vector<std::list<Message>> sends_;  // by receiver, as are those that lie in a lane until they are read:
  std::vector<std::list<Message>> unread_;
  std::list<Message> receives_;            // that no message has come for, in the order of the calls
  std::vector<Arrival> arrivals_;          // by sender
  std::list<Kept> kept_;                   // in the order in which they came
  std::vector<uint64_t> written_, read_;   // of the lanes to and from each rank
  size_t sending_ = 0, receiving_ = 0;
  Mismatch mismatch_;
  int turn_ = 0;
};

}  // namespace elastic
