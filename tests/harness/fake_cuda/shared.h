// What the ranks of a communicator share: a folder in shared memory, with a page of words that all of them read and write,
// and a file for every buffer that one of them has sent and another has not yet taken.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace fake {

constexpr int kMaxRanks = 64;

// Of one rank; zero at first. Written by that rank alone.
struct Seat {
  std::atomic<uint32_t> pid;        // written first
  std::atomic<uint32_t> arrived;    // in init; so `gpu` is written
  std::atomic<uint32_t> connected;  // the first collective, unless init connects already
  std::atomic<uint32_t> freed;      // its buffers are gone: who still uses them commits an illegal access
  std::atomic<uint64_t> posted;     // how many collectives it has put its data in place for
  std::atomic<uint64_t> taken;      // how many it is through with
  char gpu[88];
};

class Shared {
 public:
  // `name` is the communicator's: all ranks open the same.
  explicit Shared(const std::string& name);
  ~Shared();
  Seat& seat(int rank) { return seats_[rank]; }
  const std::string& name() const { return name_; }

  void put(const std::string& what, const void* data, size_t bytes);
  bool there(const std::string& what) const;
  bool get(const std::string& what, std::vector<char>& data) const;  // false: it is not there
  void remove(const std::string& what);
  void remove_all();  // the last one does

 private:
  std::string name_, folder_;
  Seat* seats_ = nullptr;
};

}  // namespace fake
