#include "lanes.h"

#include <algorithm>
#include <cstring>

#include "control.h"

namespace elastic {

namespace {

// bytes that are moved at a time, so that the other side can start early
constexpr uint64_t kPiece = 256 << 10;
constexpr int kPiecesAtOnce = 8;
constexpr uint64_t kAlign = 32;  // of a message in a lane, so that its header is contiguous

struct Header {
  uint64_t bytes;
  int64_t tag;
  uint64_t type, spare;
};
static_assert(sizeof(Header) == kAlign);

uint64_t padded(uint64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

void settle(const Message& message, int peer) {
  reinterpret_cast<std::atomic<int32_t>*>(message.state)->store(peer, std::memory_order_release);
}

}  // namespace

struct Lanes::Lane {  // zeros at first
  alignas(64) std::atomic<uint64_t> written;  // by the sender
  std::atomic<uint32_t> waits;  // by the sender: it waits for the receiver to read
  alignas(64) std::atomic<uint64_t> read;     // by the receiver
  alignas(64) uint8_t ring[1];

  // Calls `move` for each contiguous part of a range in the ring.
  template <typename Move>
  void each_part(uint64_t at, uint64_t bytes, uint64_t room, Move move) {
    const uint64_t begin = at % room, first = std::min(bytes, room - begin);
    if (first > 0) move(ring + begin, uint64_t{0}, first);
    if (bytes > first) move(ring, first, bytes - first);
  }
};

Lanes::Lanes(const elastic_options& options, uint64_t staging_bytes)
    : rank_(options.rank),
      size_(options.size),
      room_(staging_bytes / static_cast<uint64_t>(options.size) / 64 * 64 - offsetof(Lane, ring)),
      sends_(static_cast<size_t>(options.size)),
      unread_(static_cast<size_t>(options.size)),
      arrivals_(static_cast<size_t>(options.size)),
      written_(static_cast<size_t>(options.size)),
      read_(static_cast<size_t>(options.size)) {
  for (int rank = 0; rank < size_; ++rank) staging_.push_back(options.arenas[rank] + options.staging[rank]);
}

Lanes::Lane& Lanes::lane(int from, int to) const {
  return *reinterpret_cast<Lane*>(staging_[from] + static_cast<uint64_t>(to) * (room_ + offsetof(Lane, ring)));
}

void Lanes::append(std::list<Message>& incoming) {
  while (!incoming.empty()) {
    const auto message = incoming.begin();
    if (message->sends) {
      const int to = message->peer;
      sends_[to].splice(sends_[to].end(), incoming, message);
      ++sending_;
      // Set before the lane is checked: a receiver that reads in between wakes this rank.
      lane(rank_, to).waits.store(1, std::memory_order_seq_cst);
    } else if (take_kept(*message)) {
      incoming.pop_front();
    } else {
      receives_.splice(receives_.end(), incoming, message);
    }
  }
}

// ---- sending ---------------------------------------------------------------------------------------------------------

bool Lanes::settle_read() {
  const size_t before = sending_;
  for (int to = 0; to < size_ && sending_ > 0; ++to) {
    auto& queue = unread_[to];
    if (queue.empty()) continue;
    Lane& way = lane(rank_, to);
    const uint64_t read = way.read.load(std::memory_order_seq_cst);
    while (!queue.empty() && queue.front().end <= read) {
      settle(queue.front(), to);
      queue.pop_front();
      --sending_;
    }
    if (queue.empty() && sends_[to].empty()) way.waits.store(0, std::memory_order_relaxed);
  }
  return sending_ != before;
}

bool Lanes::send_some() {
  bool moved = false;
  for (int to = 0; to < size_ && sending_ > 0; ++to) {
    auto& queue = sends_[to];
    for (int pieces = 0; pieces < kPiecesAtOnce && !queue.empty() && send_one(queue, to); ++pieces) moved = true;
  }
  return moved;
}

bool Lanes::send_one(std::list<Message>& queue, int to) {
  Lane& way = lane(rank_, to);
  Message& message = queue.front();
  uint64_t free = room_ - (written_[to] - way.read.load(std::memory_order_seq_cst));
  const uint64_t before = written_[to];
  if (message.moved == 0) {
    if (free < sizeof(Header)) return false;
    const Header header{message.bytes, message.tag, message.type, 0};
    std::memcpy(way.ring + written_[to] % room_, &header, sizeof header);
    written_[to] += sizeof header, message.moved += sizeof header, free -= sizeof header;
  }
  const uint64_t done = message.moved - sizeof(Header), left = message.bytes - done;
  const uint64_t piece = std::min({left, free, kPiece});
  way.each_part(written_[to], piece, room_, [&](uint8_t* part, uint64_t at, uint64_t bytes) {
    std::memcpy(part, message.data + done + at, bytes);
  });
  written_[to] += piece, message.moved += piece;
  const bool whole = piece == left;
  if (whole) written_[to] = padded(written_[to]);  // there is room, which is a multiple of this
  if (written_[to] == before) return false;
  way.written.store(written_[to], std::memory_order_seq_cst);
  if (whole) {
    message.end = written_[to];
    unread_[to].splice(unread_[to].end(), queue, queue.begin());
  }
  return true;
}

// ---- receiving -------------------------------------------------------------------------------------------------------

bool Lanes::receive_some(bool* wake) {
  if (!pending()) return false;
  bool moved = false;
  turn_ = (turn_ + 1) % size_;  // so that a rank with many messages does not delay the others
  for (int i = 0; i < size_; ++i) {
    const int source = (turn_ + i) % size_;
    if (source != rank_) moved |= receive_one(source, wake);
  }
  return moved;
}

bool Lanes::receive_one(int source, bool* wake) {
  Lane& way = lane(source, rank_);
  Arrival& arrival = arrivals_[source];
  uint64_t available = way.written.load(std::memory_order_seq_cst) - read_[source];
  if (available == 0 || mismatch_.source >= 0) return false;
  if (!arrival.begun) {
    Header header;
    std::memcpy(&header, way.ring + read_[source] % room_, sizeof header);
    if (!begin(arrival, source, header.tag, header.type, header.bytes)) return false;
    read_[source] += sizeof header, available -= sizeof header;
  }
  uint8_t* const to = arrival.kept != nullptr ? arrival.kept->data.get() : arrival.into.front().data;
  const uint64_t left = arrival.bytes - arrival.moved, piece = std::min({left, available, kPiece});
  way.each_part(read_[source], piece, room_, [&](const uint8_t* part, uint64_t at, uint64_t bytes) {
    std::memcpy(to + arrival.moved + at, part, bytes);
  });
  read_[source] += piece, arrival.moved += piece;
  if (piece == left) {
    read_[source] = padded(read_[source]);
    if (arrival.kept != nullptr) {
      arrival.kept->whole = true;
      for (auto each = receives_.begin(); each != receives_.end(); ++each) {
        if (take_kept(*each)) {
          receives_.erase(each);
          break;
        }
      }
    } else {
      settle(arrival.into.front(), source);
      arrival.into.clear();
      --receiving_;
    }
    arrival.begun = false, arrival.kept = nullptr;
  }
  way.read.store(read_[source], std::memory_order_seq_cst);
  *wake |= way.waits.load(std::memory_order_seq_cst) != 0;
  return true;
}

// Returns whether a receive here accepts the message at the head of this lane, or a later one.
bool Lanes::begin(Arrival& arrival, int source, int64_t tag, uint64_t type, uint64_t bytes) {
  bool asked = false;
  for (auto each = receives_.begin(); each != receives_.end(); ++each) {
    if (each->peer != source && each->peer != -1) continue;
    asked = true;
    if (each->tag != tag) continue;
    if (!fits(source, type, bytes, *each)) return false;
    arrival.into.splice(arrival.into.end(), receives_, each);
    ++receiving_;
    arrival.begun = true, arrival.bytes = bytes, arrival.moved = 0;
    return true;
  }
  if (!asked) return false;
  kept_.push_back(Kept{source, tag, type, bytes, std::unique_ptr<uint8_t[]>(new uint8_t[bytes])});
  arrival.kept = &kept_.back();
  arrival.begun = true, arrival.bytes = bytes, arrival.moved = 0;
  return true;
}

bool Lanes::fits(int source, uint64_t type, uint64_t bytes, const Message& receive) {
  if (type == receive.type && bytes == receive.bytes) return true;
  mismatch_ = {source, bytes, type, receive.bytes, receive.type};
  return false;
}

bool Lanes::take_kept(const Message& receive) {
  for (auto each = kept_.begin(); each != kept_.end(); ++each) {
    if (!each->whole || each->tag != receive.tag || (receive.peer != -1 && receive.peer != each->source)) continue;
    if (!fits(each->source, each->type, each->bytes, receive)) return false;
    if (each->bytes > 0) std::memcpy(receive.data, each->data.get(), each->bytes);
    settle(receive, each->source);
    kept_.erase(each);
    return true;
  }
  return false;
}

int Lanes::awaited(uint64_t among) const {
  const auto in = [among](int rank) { return (among >> rank & 1) != 0; };
  bool all = true;
  int one = -1;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    if (!in(rank)) {
      all = false;
      continue;
    }
    one = rank;
    if (!sends_[rank].empty() || !unread_[rank].empty() || !arrivals_[rank].into.empty()) return rank;
  }
  for (const Message& message : receives_) {
    if (message.peer == -1 ? all : in(message.peer)) return message.peer == -1 ? one : message.peer;
  }
  return -1;
}

}  // namespace elastic
