// Groups whose ranks are threads of one process: every collective, sizes around windows and chunks, and all failures.
// Fails by its exit status. Run under the sanitizers by `make sanitize`.
#include "group.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <list>
#include <random>
#include <thread>
#include <vector>

#include "control.h"
#include "kernels.h"

namespace {

#define CHECK(condition)                                                              \
  do {                                                                                \
    if (!(condition)) {                                                               \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);            \
      std::abort();                                                                   \
    }                                                                                 \
  } while (false)

constexpr int32_t kInt32 = static_cast<int32_t>(elastic::DType::kInt32);
constexpr int32_t kFloat32 = static_cast<int32_t>(elastic::DType::kFloat32);
constexpr int32_t kSum = static_cast<int32_t>(elastic::Op::kSum);
constexpr size_t kArenaBytes = 64 << 20;
#if defined(__SANITIZE_THREAD__)
constexpr bool kRacesAreErrors = true;  // a late copy is a race, but it is discarded
#else
constexpr bool kRacesAreErrors = false;
#endif

void* zeros(size_t bytes) {
  void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(made != MAP_FAILED);
  return made;
}

class World {
 public:
  explicit World(int size, double timeout_s = 30.0) : size(size), control_(zeros(elastic_control_bytes(size))) {
    for (int rank = 0; rank < size; ++rank) arenas.push_back(static_cast<uint8_t*>(zeros(kArenaBytes)));
    std::vector<uint64_t> bytes(size, kArenaBytes), staging(size, kArenaBytes - elastic_staging_bytes());
    std::vector<int32_t> pidfds(size, -1);
    for (int rank = 0; rank < size; ++rank) {
      elastic_options options{rank,           size,          control_, arenas.data(), bytes.data(),
                              staging.data(), pidfds.data(), size > 2, timeout_s};
      ranks.push_back(elastic_open(&options));
      CHECK(ranks.back() != nullptr);
    }
  }

  ~World() {
    for (elastic_group* rank : ranks) elastic_close(rank);
    for (elastic_group* rank : ranks) elastic_free(rank);
    for (uint8_t* arena : arenas) munmap(arena, kArenaBytes);
    munmap(control_, elastic_control_bytes(size));
  }

  void each(const std::function<void(int, elastic_group*)>& run) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) threads.emplace_back(run, rank, ranks[rank]);
    for (std::thread& thread : threads) thread.join();
  }

  // From now on, an access to the shared memory ends the process.
  void take_away() {
    CHECK(mprotect(control_, elastic_control_bytes(size), PROT_NONE) == 0);
    for (uint8_t* arena : arenas) CHECK(mprotect(arena, kArenaBytes, PROT_NONE) == 0);
  }

  elastic::Control* control() { return static_cast<elastic::Control*>(control_); }

  int size;
  std::vector<uint8_t*> arenas;
  std::vector<elastic_group*> ranks;

 private:
  void* control_;
};

void finish(elastic_group* group, uint64_t ticket) {
  CHECK(ticket != 0);
  CHECK(elastic_wait(group, ticket, 60.0) == 1);
  CHECK(elastic_done(group, ticket) == 1);
}

// Element i of rank r in the n-th call.
int32_t element(int rank, uint64_t i, int call) { return static_cast<int32_t>(i * 7 + rank * 1000003 + call * 31); }

// Result of it on all ranks.
int32_t sum_of(const World& world, uint64_t i, int call) {
  uint32_t sum = 0;
  for (int rank = 0; rank < world.size; ++rank) sum += static_cast<uint32_t>(element(rank, i, call));
  return static_cast<int32_t>(sum);
}

// 0: in the arena, 1: outside, 2: depends on the rank
void reduces_everywhere(World& world, uint64_t count, int where) {
  world.each([&](int rank, elastic_group* group) {
    std::vector<int32_t> outside(count + 1);
    const bool inside = where == 0 || (where == 2 && rank % 2 == 0);
    auto* data = inside ? reinterpret_cast<int32_t*>(world.arenas[rank] + 4096 * (rank + 1)) : outside.data();
    for (int call = 0; call < 3; ++call) {
      for (uint64_t i = 0; i < count; ++i) data[i] = element(rank, i, call);
      data[count] = -7;  // past the end
      finish(group, elastic_allreduce(group, data, data, count, kInt32, kSum, 1.0, 1.0));
      for (uint64_t i = 0; i < count; ++i) CHECK(data[i] == sum_of(world, i, call));
      CHECK(data[count] == -7);
    }
  });
}

// From read-only memory into other memory, each in the arena or outside, depending on rank and call; in the last calls
// equal on all ranks.
void reduces_into_other_memory(World& world, uint64_t count) {
  world.each([&](int rank, elastic_group* group) {
    std::vector<int32_t> source_outside(count), result_outside(count + 1);
    auto* arena = reinterpret_cast<int32_t*>(world.arenas[rank]);
    for (int call = 0; call < 8; ++call) {
      const int says = call < 4 ? rank : 0;
      int32_t* source = (call + says) % 2 == 0 ? source_outside.data() : arena + 1024;
      int32_t* result = (call / 2 + says) % 2 == 0 ? arena + 2048 + count : result_outside.data();
      for (uint64_t i = 0; i < count; ++i) source[i] = element(rank, i, call), result[i] = -3;
      result[count] = -7;  // past the end
      finish(group, elastic_allreduce(group, source, result, count, kInt32, kSum, 1.0, 1.0));
      for (uint64_t i = 0; i < count; ++i) {
        CHECK(result[i] == sum_of(world, i, call));
        CHECK(source[i] == element(rank, i, call));
      }
      CHECK(result[count] == -7);
    }
  });
}

// Rank r has r % 3 buffers; their sum is added from the last one to the first, which is no order of ranks.
void trees(World& world, uint64_t count) {
  std::vector<int32_t> program;
  for (int rank = world.size - 1; rank >= 0; --rank) {
    for (int place = rank % 3 - 1; place >= 0; --place) program.push_back(rank << 16 | place);
  }
  for (size_t i = program.size(); i > 1; --i) program.push_back(-1);
  world.each([&](int rank, elastic_group* group) {
    const uint64_t stride = (count + 16) * sizeof(float);
    auto* data = reinterpret_cast<uint8_t*>(world.arenas[rank]) + 4096 * (rank + 1);
    auto at = [&](int place) { return reinterpret_cast<float*>(data + static_cast<uint64_t>(place) * stride); };
    auto value = [](int owner, int place, uint64_t i) { return 1.0f / static_cast<float>(1 + i + owner * 7 + place * 3); };
    for (int place = 0; place < std::max(1, rank % 3); ++place) {
      for (uint64_t i = 0; i < count; ++i) at(place)[i] = value(rank, place, i);
    }
    finish(group, elastic_reduce_tree(group, data, count, stride, kFloat32, program.data(), program.size(), 1.0, 5.0));
    for (uint64_t i = 0; i < count; ++i) {
      float sum = 0;
      for (int owner = 0; owner < world.size; ++owner) {
        for (int place = 0; place < owner % 3; ++place) {
          sum = owner == 1 && place == 0 ? value(owner, place, i) : value(owner, place, i) + sum;
        }
      }
      CHECK(at(0)[i] == sum / 5.0f);
    }
    for (uint64_t i = 0; rank % 3 == 2 && i < count; ++i) CHECK(at(1)[i] == value(rank, 1, i));
  });
}

void many_at_once(World& world) {
  world.each([&](int rank, elastic_group* group) {
    constexpr int kCalls = 40;
    constexpr uint64_t kCount = 170'001;
    auto* arena = reinterpret_cast<float*>(world.arenas[rank]);
    std::vector<float> outside(kCount * kCalls);
    std::vector<uint64_t> tickets;
    for (int call = 0; call < kCalls; ++call) {
      float* data = call % 3 == 2 ? outside.data() + call * kCount : arena + call * kCount;
      for (uint64_t i = 0; i < kCount; ++i) data[i] = static_cast<float>(rank + call);
      tickets.push_back(elastic_allreduce(group, data, data, kCount, kFloat32, kSum, 0.5, 1.0));
    }
    for (int call = kCalls - 1; call >= 0; --call) finish(group, tickets[call]);
    const float ranks = static_cast<float>(world.size);
    for (int call = 0; call < kCalls; ++call) {
      const float* data = call % 3 == 2 ? outside.data() + call * kCount : arena + call * kCount;
      const float expected = 0.5f * (ranks * (ranks - 1) / 2 + ranks * static_cast<float>(call));
      for (uint64_t i = 0; i < kCount; ++i) CHECK(data[i] == expected);
    }
  });
}

void halves(World& world, uint64_t count) {
  world.each([&](int rank, elastic_group* group) {
    auto* data = reinterpret_cast<int32_t*>(world.arenas[rank]);
    for (uint64_t i = 0; i < count; ++i) data[i] = element(rank, i, 1);
    finish(group, elastic_reduce_shares(group, data, count, kInt32, kSum, 1.0, 1.0));
    uint64_t begin, end, covered = 0;
    elastic_share(count, kInt32, world.size, rank, &begin, &end);
    for (uint64_t i = 0; i < count; ++i) {
      uint32_t sum = 0;
      for (int other = 0; other < world.size; ++other) sum += static_cast<uint32_t>(element(other, i, 1));
      CHECK(data[i] == (i >= begin && i < end ? static_cast<int32_t>(sum) : element(rank, i, 1)));
    }
    for (uint64_t i = begin; i < end; ++i) data[i] += 5;  // as another network would do
    finish(group, elastic_spread_shares(group, data, count, kInt32));
    for (int owner = 0; owner < world.size; ++owner) {
      elastic_share(count, kInt32, world.size, owner, &begin, &end);
      CHECK(begin == covered);
      covered = end;
    }
    CHECK(covered == count);
    for (uint64_t i = 0; i < count; ++i) {
      uint32_t sum = 5;
      for (int other = 0; other < world.size; ++other) sum += static_cast<uint32_t>(element(other, i, 1));
      CHECK(data[i] == static_cast<int32_t>(sum));
    }
    CHECK(elastic_reduce_shares(group, &covered, 1, kInt32, kSum, 1.0, 1.0) == 0);  // not in the arena
  });
}

void moves(World& world, uint64_t bytes) {
  world.each([&](int rank, elastic_group* group) {
    std::mt19937 random(rank);
    std::vector<uint8_t> data(bytes + 1);
    for (int root = 0; root < world.size; ++root) {
      for (uint64_t i = 0; i < bytes; ++i) data[i] = static_cast<uint8_t>(rank == root ? i * 3 + root : 0);
      finish(group, elastic_broadcast(group, data.data(), bytes, root));
      for (uint64_t i = 0; i < bytes; ++i) CHECK(data[i] == static_cast<uint8_t>(i * 3 + root));
    }
    std::vector<std::vector<uint8_t>> outputs(world.size, std::vector<uint8_t>(bytes + 1));
    std::vector<void*> pointers;
    for (auto& output : outputs) pointers.push_back(output.data());
    for (uint64_t i = 0; i < bytes; ++i) data[i] = static_cast<uint8_t>(i + rank * 11);
    finish(group, elastic_allgather(group, pointers.data(), data.data(), bytes));
    for (int other = 0; other < world.size; ++other) {
      for (uint64_t i = 0; i < bytes; ++i) CHECK(outputs[other][i] == static_cast<uint8_t>(i + other * 11));
    }
    // Rank r sends (r + to) % 3 parts of `bytes` to each.
    const auto parts = [&](int from, int to) { return static_cast<uint64_t>((from + to) % 3) * bytes; };
    std::vector<uint64_t> sent, received;
    std::vector<uint8_t> out, in, expected;
    for (int other = 0; other < world.size; ++other) {
      sent.push_back(parts(rank, other));
      received.push_back(parts(other, rank));
      out.insert(out.end(), sent.back(), static_cast<uint8_t>(rank * 16 + other));
      expected.insert(expected.end(), received.back(), static_cast<uint8_t>(other * 16 + rank));
    }
    in.resize(expected.size() + 1);
    out.resize(out.size() + 1);
    finish(group, elastic_alltoall(group, in.data(), out.data(), received.data(), sent.data()));
    in.pop_back();
    CHECK(in == expected);
    finish(group, elastic_barrier(group));
  });
}

void an_abort_ends_all_waits() {
  World world(3);
  world.each([&](int rank, elastic_group* group) {
    std::vector<float> data(1 << 20);
    const uint64_t ticket = elastic_allreduce(group, data.data(), data.data(), data.size(), kFloat32, kSum, 1.0, 1.0);
    if (rank == 2) {
      elastic_abort(group);
      elastic_abort(group);
    }
    if (elastic_wait(group, ticket, 60.0) == 1) {  // it was complete before the abort
      CHECK(elastic_wait(group, elastic_barrier(group), 60.0) == -1);
    }
    CHECK(elastic_status(group) == (elastic::kAborted << 8 | 2));
    CHECK(elastic_drain(group, 10.0) == 1);
    CHECK(elastic_wait(group, elastic_barrier(group), 1.0) == -1);
  });
}

void who_never_comes_is_named(int absent) {
  World world(3, 0.05);
  world.each([&](int rank, elastic_group* group) {
    if (rank == absent) return;
    CHECK(elastic_wait(group, elastic_barrier(group), 60.0) == -1);
    CHECK(elastic_status(group) == (elastic::kLate << 8 | static_cast<uint64_t>(absent)));
  });
}

void what_does_not_fit_is_noticed(bool sizes_of_alltoall) {
  World world(2);
  world.each([&](int rank, elastic_group* group) {
    uint64_t ticket;
    std::vector<uint8_t> data(4096), output(4096);
    if (sizes_of_alltoall) {
      const uint64_t sent[] = {16, 16}, received[] = {16, rank == 0 ? 32u : 16u};
      ticket = elastic_alltoall(group, output.data(), data.data(), received, sent);
    } else {
      ticket = elastic_allreduce(group, data.data(), data.data(), 10 + rank, kInt32, kSum, 1.0, 1.0);
    }
    const int32_t verdict = elastic_wait(group, ticket, 60.0);
    CHECK(verdict == -1 || (sizes_of_alltoall && rank == 1));
    CHECK(elastic_status(group) >> 8 == elastic::kOther);
  });
}

void the_odd_one_is_named(int odd) {
  World world(3);
  world.each([&](int rank, elastic_group* group) {
    std::vector<uint8_t> data(4096);
    const uint64_t ticket = elastic_allreduce(group, data.data(), data.data(), rank == odd ? 11 : 10, kInt32, kSum, 1.0, 1.0);
    CHECK(elastic_wait(group, ticket, 60.0) == -1);
    CHECK(elastic_status(group) == (elastic::kOther << 8 | static_cast<uint64_t>(odd)));
  });
}

// A rank that announces memory beyond its arena: it must not be read or written.
void what_lies_outside_of_an_arena_is_refused(uint64_t offset, uint64_t result) {
  World world(2);
  auto* data = reinterpret_cast<int32_t*>(world.arenas[0]);
  const uint64_t ticket = elastic_allreduce(world.ranks[0], data, data, 1024, kInt32, kSum, 1.0, 1.0);
  elastic::Seat* const seats = world.control()->seats;
  seats[1].offers[0] = {seats[0].offers[0].signature, offset, result};
  seats[1].ready.store(1);
  CHECK(elastic_wait(world.ranks[0], ticket, 60.0) == -1);
  CHECK(elastic_status(world.ranks[0]) == (elastic::kOther << 8 | 1));
}

void a_wait_has_its_own_limit() {
  World world(2);
  const uint64_t ticket = elastic_barrier(world.ranks[0]);
  CHECK(elastic_wait(world.ranks[0], ticket, 0.01) == 0);
  CHECK(elastic_done(world.ranks[0], ticket) == 0);
  finish(world.ranks[1], elastic_barrier(world.ranks[1]));
  finish(world.ranks[0], ticket);
}

// A rank that is finished leaves immediately, which does not invalidate what was complete by then.
void what_was_complete_outlives_an_abort(uint64_t count, bool inside) {
  World world(2);
  world.each([&](int rank, elastic_group* group) {
    std::vector<int32_t> outside(count + 1);
    int32_t* data = inside ? reinterpret_cast<int32_t*>(world.arenas[rank]) : outside.data();
    for (uint64_t i = 0; i < count; ++i) data[i] = element(rank, i, 1);
    const uint64_t ticket = elastic_allreduce(group, data, data, count, kInt32, kSum, 1.0, 1.0);
    finish(group, ticket);
    elastic_abort(group);
    for (uint64_t i = 0; i < count; ++i) {
      CHECK(static_cast<uint32_t>(data[i]) ==
            static_cast<uint32_t>(element(0, i, 1)) + static_cast<uint32_t>(element(1, i, 1)));
    }
    CHECK(elastic_done(group, ticket) == 1);
    CHECK(elastic_wait(group, elastic_barrier(group), 60.0) == -1);
  });
}

void a_barrier_that_all_reached_is_passed() {
  World world(3);
  world.each([&](int, elastic_group* group) {
    finish(group, elastic_barrier(group));
    elastic_close(group);
  });
}

// Another rank may write into this one's arena when the group is aborted; after `elastic_drain` it does not, and no
// thread of ours writes into outside memory. Collectives that were complete before are right.
void nothing_is_written_after_a_drain(int size, int seed) {
  World world(size);
  world.each([&](int rank, elastic_group* group) {
    constexpr int kCalls = 4;
    constexpr uint64_t kCount = 2 << 20;
    std::vector<int32_t> outside(kCount), source(kCount, 1);
    int32_t* buffers[kCalls];
    uint64_t tickets[kCalls];
    for (int call = 0; call < kCalls; ++call) {
      const bool inside = (call + seed / 4) % 4 != 0;
      buffers[call] = inside ? reinterpret_cast<int32_t*>(world.arenas[rank]) + call * kCount : outside.data();
      for (uint64_t i = 0; i < kCount; ++i) buffers[call][i] = 1;
    }
    finish(group, elastic_barrier(group));  // all have filled theirs
    for (int call = 0; call < kCalls; ++call) {
      const int32_t* from = (call + seed) % 2 == 0 ? source.data() : buffers[call];
      tickets[call] = elastic_allreduce(group, from, buffers[call], kCount, kInt32, kSum, 1.0, 1.0);
    }
    const auto everywhere = [&](int call, int32_t expected) {
      for (uint64_t i = 0; i < kCount; ++i) CHECK(buffers[call][i] == expected);
    };
    std::mt19937 random(seed * 64 + rank);
    if (rank == seed % size) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 8000));
      elastic_abort(group);
    }
    const uint64_t last = elastic_barrier(group);
    if (seed % 3 != 0) {
      elastic_wait(group, last, 60.0);
      for (int call = 0; call < kCalls; ++call) {
        if (elastic_wait(group, tickets[call], 60.0) == 1) everywhere(call, world.size);
      }
    }
    while (elastic_status(group) == 0) std::this_thread::yield();
    CHECK(elastic_status(group) == (elastic::kAborted << 8 | static_cast<uint64_t>(seed % size)));
    CHECK(elastic_drain(group, 60.0) == 1);
    for (int call = 0; call < kCalls; ++call) std::fill_n(buffers[call], kCount, -3);
    elastic_wait(group, last, 60.0);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    for (int call = 0; call < kCalls; ++call) everywhere(call, -3);
  });
}

// A rank that left uses its staging for something else. A rank that has read it must not report a result.
void no_copy_is_taken_of_what_has_gone(uint64_t bytes) {
  World world(3);
  world.each([&](int rank, elastic_group* group) {
    std::vector<uint8_t> data(bytes, static_cast<uint8_t>(rank == 0 ? 9 : 0));
    const int32_t verdict = elastic_wait(group, elastic_broadcast(group, data.data(), bytes, 0), 60.0);
    if (rank == 0) {
      CHECK(verdict == 1);
      elastic_abort(group);
      std::memset(world.arenas[0] + kArenaBytes - elastic_staging_bytes(), 1, elastic_staging_bytes());
    } else if (verdict == 1) {
      for (const uint8_t byte : data) CHECK(byte == 9);
    }
  });
}

// Two threads of each rank start the same collective concurrently, and wait for each other's.
void any_thread_may_start_and_wait(World& world) {
  constexpr int kCalls = 200;
  constexpr uint64_t kCount = 20'001;
  std::vector<std::vector<int32_t>> outside(static_cast<size_t>(world.size), std::vector<int32_t>(2 * kCount));
  std::vector<std::atomic<uint64_t>> newest(static_cast<size_t>(world.size));
  world.each([&](int rank, elastic_group* group) {
    const auto run = [&](int thread) {
      int32_t* data = thread == 0 ? reinterpret_cast<int32_t*>(world.arenas[rank]) : outside[rank].data();
      for (int call = 0; call < kCalls; ++call) {
        for (uint64_t i = 0; i < kCount; ++i) data[i] = 1;
        const uint64_t ticket = elastic_allreduce(group, data, data, kCount, kInt32, kSum, 1.0, 1.0);
        newest[rank] = ticket;
        finish(group, ticket);
        for (uint64_t i = 0; i < kCount; ++i) CHECK(data[i] == world.size);
        finish(group, newest[rank]);
      }
    };
    std::thread other(run, 1);
    run(0);
    other.join();
  });
}

// Hundreds of rounds of every kind in progress, while the ranks fall behind and catch up in turn.
void ranks_run_far_apart(World& world, int seed) {
  world.each([&](int rank, elastic_group* group) {
    constexpr int kCalls = 150;
    constexpr uint64_t kMost = 300'000;
    std::mt19937 same(seed), own(seed * 64 + rank);
    std::vector<std::vector<int32_t>> data(kCalls), gathered(kCalls);
    std::vector<uint64_t> tickets;
    int32_t* arena = reinterpret_cast<int32_t*>(world.arenas[rank]);
    int32_t* next = arena;
    struct Call {
      int kind;
      uint64_t count;
      int root;
      int32_t* data;
    };
    std::vector<Call> calls;
    for (int n = 0; n < kCalls; ++n) {
      const int kind = static_cast<int>(same() % 5);
      const uint64_t count = same() % (same() % 8 == 0 ? kMost : 2000);
      const int root = static_cast<int>(same() % world.size);
      const bool inside = kind < 3 && own() % 2 == 0 && static_cast<uint64_t>(next - arena) + count < 12'000'000;
      data[n].resize(inside ? 1 : count + 1);
      int32_t* buffer = inside ? next : data[n].data();
      if (inside) next += count;
      for (uint64_t i = 0; i < count; ++i) buffer[i] = element(rank, i, n);
      if (own() % 40 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 2000));
      if (kind < 3) {
        tickets.push_back(elastic_allreduce(group, buffer, buffer, count, kInt32, kSum, 1.0, 1.0));
      } else if (kind == 3) {
        tickets.push_back(elastic_broadcast(group, buffer, count * 4, root));
      } else {
        gathered[n].resize(count * static_cast<uint64_t>(world.size) + 1);
        std::vector<void*> outputs;
        for (int other = 0; other < world.size; ++other) outputs.push_back(gathered[n].data() + count * other);
        tickets.push_back(elastic_allgather(group, outputs.data(), buffer, count * 4));
      }
      calls.push_back({kind, count, root, buffer});
      if (own() % 30 == 0) finish(group, tickets[own() % tickets.size()]);
    }
    for (const uint64_t ticket : tickets) finish(group, ticket);
    for (int n = 0; n < kCalls; ++n) {
      const Call& call = calls[n];
      for (uint64_t i = 0; i < call.count; ++i) {
        if (call.kind == 4) {
          for (int other = 0; other < world.size; ++other) {
            CHECK(gathered[n][call.count * other + i] == element(other, i, n));
          }
        } else if (call.kind == 3) {
          CHECK(call.data[i] == element(call.root, i, n));
        } else {
          uint32_t sum = 0;
          for (int other = 0; other < world.size; ++other) sum += static_cast<uint32_t>(element(other, i, n));
          CHECK(call.data[i] == static_cast<int32_t>(sum));
        }
      }
    }
  });
}

// ---- messages --------------------------------------------------------------------------------------------------------

struct Mail {
  explicit Mail(uint64_t count = 0, int32_t value = 0) : values(count, value) {}
  void send(elastic_group* group, int to, int64_t tag) {
    CHECK(elastic_send(group, values.data(), values.size() * 4, type, to, tag, &state) == 1);
  }
  void receive(elastic_group* group, int source, int64_t tag) {
    CHECK(elastic_receive(group, values.data(), values.size() * 4, type, source, tag, &state) == 1);
  }
  int wait(elastic_group* group) {  // the other rank
    CHECK(elastic_wait_message(group, &state, 30.0) == 1);
    return state;
  }

  std::vector<int32_t> values;
  uint64_t type = 9;
  int32_t state = -1;
};

void messages_find_their_receives(uint64_t count) {
  World world(3);
  world.each([count](int rank, elastic_group* group) {
    if (rank == 2) {  // waits for the last sent messages first, and then for any
      for (const int64_t tag : {7, 5}) {
        for (const int source : {1, 0}) {
          Mail got(count);
          got.receive(group, source, tag);
          CHECK(got.wait(group) == source);
          for (const int32_t value : got.values) CHECK(value == source * 100 + tag);
        }
      }
      int sum = 0;
      for (int i = 0; i < 4; ++i) {
        Mail got(count);
        got.receive(group, -1, 6);
        sum += 1 + got.wait(group);
        CHECK(count == 0 || got.values[count - 1] == got.state * 100 + 6);
      }
      CHECK(sum == 6);
      return;
    }
    std::list<Mail> sent;
    for (const int64_t tag : {5, 6, 6, 7}) {
      sent.emplace_back(count, static_cast<int32_t>(rank * 100 + tag));
      sent.back().send(group, 2, tag);
    }
    for (Mail& each : sent) CHECK(each.wait(group) == 2);
  });
}

void many_messages_cross(int seed) {
  World world(4);
  world.each([seed](int rank, elastic_group* group) {
    std::mt19937 same(seed);
    std::list<Mail> mails;
    std::vector<std::pair<Mail*, int32_t>> received;
    for (int n = 0; n < 400; ++n) {
      const int from = static_cast<int>(same() % 4), to = (from + 1 + static_cast<int>(same() % 3)) % 4;
      const uint64_t count = same() % (same() % 20 == 0 ? 600'000 : 900);
      const int64_t tag = same() % 3;
      if (rank == from) {
        mails.emplace_back(count, n);
        mails.back().send(group, to, tag);
      } else if (rank == to) {
        mails.emplace_back(count);
        mails.back().receive(group, from, tag);
        received.emplace_back(&mails.back(), n);
      }
    }
    std::shuffle(received.begin(), received.end(), same);
    for (const auto& [mail, n] : received) {
      mail->wait(group);
      for (const int32_t value : mail->values) CHECK(value == n);
    }
    for (Mail& mail : mails) mail.wait(group);
  });
}

// No thread waits: the group's own threads make the progress.
void messages_travel_by_themselves() {
  World world(2);
  Mail sent(3'000'000, 4), got(3'000'000);
  got.receive(world.ranks[1], 0, 0);
  sent.send(world.ranks[0], 1, 0);
  const auto state = reinterpret_cast<std::atomic<int32_t>*>(&got.state);
  while (state->load() == -1) std::this_thread::yield();
  for (const int32_t value : got.values) CHECK(value == 4);
}

// A sender may leave then; what was read counts, even if the group fails before that is noticed.
void a_sender_is_through_when_its_message_was_read() {
  World world(2);
  Mail first(100, 1), second(100, 2), got(100), kept(100);
  first.send(world.ranks[0], 1, 0);
  second.send(world.ranks[0], 1, 1);
  CHECK(elastic_wait_message(world.ranks[0], &second.state, 0.02) == 0);
  got.receive(world.ranks[1], 0, 1);
  CHECK(got.wait(world.ranks[1]) == 0);
  elastic_abort(world.ranks[1]);
  CHECK(first.wait(world.ranks[0]) == 1 && second.wait(world.ranks[0]) == 1);
  kept.receive(world.ranks[1], 0, 0);
  CHECK(kept.wait(world.ranks[1]) == 0 && kept.values[99] == 1 && got.values[99] == 2);
}

// Sent before or after the receive, and kept meanwhile or not.
void a_message_that_does_not_fit_fails(uint64_t sent, uint64_t room, uint64_t type, bool kept) {
  World world(2);
  Mail mail(sent), got(room, -9), other(0);
  got.type = type;
  mail.send(world.ranks[0], 1, 0);
  if (kept) {
    other.send(world.ranks[0], 1, 1);
    Mail first(0);
    first.receive(world.ranks[1], 0, 1);
    first.wait(world.ranks[1]);
  }
  got.receive(world.ranks[1], 0, 0);
  CHECK(elastic_wait_message(world.ranks[1], &got.state, 30.0) == -1);
  for (const int32_t value : got.values) CHECK(value == -9);
  for (elastic_group* group : world.ranks) {
    uint64_t words[elastic::kMismatchWords] = {};
    CHECK(elastic_status(group) == (elastic::kMismatch << 8 | 1));
    elastic_mismatch(group, words);
    const uint64_t expected[] = {0, sent * 4, 9, room * 4, type};
    CHECK(std::equal(std::begin(words), std::end(words), expected));
  }
  elastic_close(world.ranks[0]);
  CHECK(elastic_drain(world.ranks[0], 30.0) == 1 && elastic_detach(world.ranks[0], 30.0) == 1);
  uint64_t words[elastic::kMismatchWords] = {};
  elastic_mismatch(world.ranks[0], words);
  CHECK(words[1] == sent * 4);
}

void a_message_fails_with_its_group() {
  World world(2);
  Mail long_one(2000), short_one(1000), after(1);
  long_one.send(world.ranks[0], 1, 0);
  short_one.receive(world.ranks[1], 0, 0);
  CHECK(elastic_wait_message(world.ranks[1], &short_one.state, 30.0) == -1);
  after.receive(world.ranks[0], 1, 0);
  CHECK(elastic_wait_message(world.ranks[0], &after.state, 30.0) == -1);
  CHECK(elastic_drain(world.ranks[0], 30.0) == 1 && elastic_drain(world.ranks[1], 30.0) == 1);
  CHECK(elastic_send(world.ranks[0], &after, 1, 0, 0, 0, &after.state) == 0);
  CHECK(elastic_receive(world.ranks[0], &after, 1, 0, 2, 0, &after.state) == 0);
}

void who_is_detached_touches_nothing_that_is_shared(int seed) {
  World world(2);
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 6; ++i) {
    elastic_group* group = world.ranks[i % 2];
    threads.emplace_back([&over, group, i] {
      std::vector<int32_t> data(20'000);
      while (!over.load()) {
        const uint64_t ticket =
            i < 2 ? elastic_allreduce(group, data.data(), data.data(), data.size(), kInt32, kSum, 1.0, 1.0) : elastic_barrier(group);
        CHECK(ticket != 0);
        elastic_wait(group, ticket, 0.001);
        elastic_done(group, ticket);
        if (elastic_status(group) == 0) continue;
        elastic_abort(group);
        elastic_drain(group, 0.0);
      }
    });
  }
  std::this_thread::sleep_for(std::chrono::microseconds(seed * 37 % 1500));
  for (elastic_group* rank : world.ranks) {
    elastic_close(rank);
    CHECK(elastic_drain(rank, 30.0) == 1);
    CHECK(elastic_detach(rank, 30.0) == 1);
    CHECK(elastic_detach(rank, 30.0) == 1);
  }
  world.take_away();
  std::this_thread::sleep_for(std::chrono::microseconds(500));
  over = true;
  for (std::thread& thread : threads) thread.join();
  for (elastic_group* rank : world.ranks) {
    CHECK(elastic_status(rank) != 0);
    CHECK(elastic_wait(rank, elastic_barrier(rank), 1.0) == -1);
    CHECK(elastic_drain(rank, 0.0) == 1);
  }
}

void a_call_under_way_is_waited_for() {
  World world(2);
  elastic_group* const group = world.ranks[0];
  std::atomic<uint32_t>& writing = world.control()->seats[1].writing;
  elastic_close(group);
  writing = 1;  // so that a drain takes time
  std::thread drains([group] { elastic_drain(group, 0.3); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  CHECK(elastic_detach(group, 0.01) == 0);
  drains.join();
  CHECK(elastic_detach(group, 0.01) == 1);
  writing = 0;
  CHECK(elastic_drain(group, 0.0) == 0);  // as at its last check
}

void nonsense_is_refused() {
  World world(2);
  uint8_t byte = 0;
  CHECK(elastic_allreduce(world.ranks[0], &byte, &byte, 1, 77, kSum, 1.0, 1.0) == 0);
  CHECK(elastic_allreduce(world.ranks[0], &byte, &byte, 1, kInt32, 2, 1.0, 1.0) == 0);
  CHECK(elastic_reduce_shares(world.ranks[0], world.arenas[0], 1, kInt32, 0, 1.0, 1.0) == 0);
  CHECK(elastic_spread_shares(world.ranks[0], world.arenas[0], 1, -1) == 0);
  CHECK(elastic_broadcast(world.ranks[0], &byte, 1, 2) == 0);
  for (const std::vector<int32_t>& program : std::vector<std::vector<int32_t>>{
           {}, {-1}, {0, 0}, {0, -1}, {2 << 16}, {-2}, {0xffff}, std::vector<int32_t>(17, 0)}) {
    CHECK(elastic_reduce_tree(world.ranks[0], world.arenas[0], 4096, 16384, kFloat32, program.data(), program.size(),
                              1.0, 1.0) == 0);
  }
  const int32_t own = 0;
  CHECK(elastic_reduce_tree(world.ranks[0], world.arenas[0], 4096, 16000, kFloat32, &own, 1, 1.0, 1.0) == 0);
  CHECK(elastic_reduce_tree(world.ranks[0], &byte, 1, 4, kFloat32, &own, 1, 1.0, 1.0) == 0);
  world.each([&](int, elastic_group* group) { finish(group, elastic_barrier(group)); });
}

}  // namespace

int main() {
  const bool thorough = std::getenv("ELASTIC_THOROUGH") != nullptr;
  for (const int size : {2, 3, 5}) {
    World world(size);
    for (const uint64_t count : {0, 1, 5, 16'384, 16'385, 131'072, 131'073, 400'000}) {
      for (const int where : {0, 1, 2}) reduces_everywhere(world, count, where);
      reduces_into_other_memory(world, count);
      halves(world, count);
      trees(world, count);
    }
    for (const uint64_t bytes : {0, 1, 1000, 524'288, 524'289, 1'500'000}) moves(world, bytes);
    many_at_once(world);
    if (thorough) reduces_everywhere(world, 9'000'000, 0);
  }
  for (const int size : {2, 3}) {
    World world(size);
    for (int seed = 0; seed < 5; ++seed) ranks_run_far_apart(world, seed);
    any_thread_may_start_and_wait(world);
  }
  for (int i = 0; i < 200; ++i) {
    what_was_complete_outlives_an_abort(i % 2 == 0 ? 1 : 1000, i % 4 < 2);
    a_barrier_that_all_reached_is_passed();
    if (i % 10 == 0) what_was_complete_outlives_an_abort(8 << 20, true);
    if (i % 10 == 5) what_was_complete_outlives_an_abort(1 << 20, false);
  }
  for (int seed = 0; seed < 30; ++seed) nothing_is_written_after_a_drain(2 + seed % 2, seed);
  for (int i = 0; i < 200 && !kRacesAreErrors; ++i) no_copy_is_taken_of_what_has_gone(i % 2 == 0 ? 1'500'000 : 200'000);
  for (const uint64_t count : {0, 1, 5000, 400'000}) messages_find_their_receives(count);
  for (int seed = 0; seed < 5; ++seed) many_messages_cross(seed);
  messages_travel_by_themselves();
  a_sender_is_through_when_its_message_was_read();
  for (const bool kept : {false, true}) {
    a_message_that_does_not_fit_fails(2000, 1000, 9, kept);
    a_message_that_does_not_fit_fails(1000, 2000, 9, kept);
    a_message_that_does_not_fit_fails(1000, 1000, 8, kept);
  }
  a_message_fails_with_its_group();
  nonsense_is_refused();
  a_call_under_way_is_waited_for();
  for (int seed = 0; seed < 40; ++seed) who_is_detached_touches_nothing_that_is_shared(seed);
  for (int i = 0; i < 20; ++i) an_abort_ends_all_waits();
  for (const int absent : {0, 1, 2}) who_never_comes_is_named(absent);
  what_does_not_fit_is_noticed(false);
  what_does_not_fit_is_noticed(true);
  for (const int odd : {0, 1, 2}) the_odd_one_is_named(odd);
  for (const uint64_t place : {kArenaBytes - 4095, kArenaBytes + 1, ~size_t{0}}) {
    what_lies_outside_of_an_arena_is_refused(place, 0);
    what_lies_outside_of_an_arena_is_refused(0, place);
  }
  a_wait_has_its_own_limit();
  std::puts("group_test: all passed");
  return 0;
}
