// The reductions under the sanitizers: no byte outside of the elements is read or written, for any length and
// alignment, and two threads that reduce neighbouring elements do not touch each other's.
// tests/unit/elastic/collectives/shared_memory/test_kernels.py checks every bit of the results; here they are compared
// with a plain loop in simple cases.
#include "kernels.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr const char* kSets[] = {"baseline", "neon", "avx2", "avx512"};
constexpr size_t kLengths[] = {0, 1, 2, 3, 7, 8, 9, 31, 63, 64, 65, 255, 256, 257, 1000};
constexpr int kDTypes = 9;
constexpr int kOps[] = {1, 3, 4, 5};

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

bool runs(const char* set) {
  const void* nothing[] = {nullptr};
  return elastic_reduce(set, 0, 1, nullptr, 0, nothing, 1, 0, 1.0, 1.0) != -2;
}

// Memory of exactly this size, so that the sanitizer detects the next byte; the bytes before `data` are unused.
struct Elements {
  Elements(size_t bytes, size_t unused)
      : memory(static_cast<uint8_t*>(std::malloc(bytes + unused))), data(memory + unused) {
    for (size_t i = 0; i < bytes + unused; ++i) memory[i] = static_cast<uint8_t>(i * 37 + unused);
  }
  ~Elements() { std::free(memory); }
  Elements(const Elements&) = delete;
  uint8_t* memory;
  uint8_t* data;
};

void stay_within(const char* set) {
  for (int dtype = 0; dtype < kDTypes; ++dtype) {
    const size_t width = elastic::element_bytes(static_cast<elastic::DType>(dtype));
    for (int op : kOps) {
      for (size_t length : kLengths) {
        for (int n : {1, 2, 3, 4, 8}) {
          std::vector<Elements*> places;
          std::vector<void*> in_place;
          for (int rank = 0; rank < n; ++rank) {
            places.push_back(new Elements(length * width, static_cast<size_t>(rank % 5) * width));
            in_place.push_back(places.back()->data);
          }
          Elements more(length * width, 3 * width);
          std::vector<const void*> sources(in_place.begin(), in_place.end());
          std::vector<void*> destinations = in_place;
          if (length % 2 == 1) destinations.push_back(more.data);
          require(elastic_reduce(set, dtype, op, destinations.data(), static_cast<int>(destinations.size()),
                                 sources.data(), n, length, n == 2 ? 1.0 : 0.25, n == 2 ? 1.0 : 3.0) == 0,
                  "a reduction of known numbers");
          for (void* place : destinations) {
            require(length == 0 || std::memcmp(place, destinations[0], length * width) == 0,
                    "every destination has the same bits");
          }
          for (Elements* place : places) delete place;
        }
      }
    }
  }
}

void sum_as_a_loop_does(const char* set) {
  for (size_t length : kLengths) {
    std::vector<float> a(length), b(length), wanted(length);
    for (size_t i = 0; i < length; ++i) {
      a[i] = static_cast<float>(i) * 0.37f;
      b[i] = 1.0f / static_cast<float>(i + 1);
      wanted[i] = (a[i] + b[i]) * 0.3f / 7.0f;
    }
    void* destinations[] = {a.data(), b.data()};
    const void* sources[] = {a.data(), b.data()};
    require(elastic_reduce(set, 7, 1, destinations, 2, sources, 2, length, static_cast<double>(0.3f), 7.0) == 0, "a sum");
    require(a == wanted && b == wanted, "the sum of a plain loop");
  }
}

// Long destinations are written past the caches, if they are no sources.
void add_up_elsewhere(const char* set) {
  for (int dtype = 0; dtype < kDTypes; ++dtype) {
    const size_t width = elastic::element_bytes(static_cast<elastic::DType>(dtype));
    const size_t length = (1 << 20) / width + 7;
    for (int n : {1, 2, 3, 4}) {
      Elements first(length * width, 0), second(length * width, width), apart(length * width, 3 * width);
      const void* sources[] = {first.data, second.data, second.data, second.data};
      void* elsewhere[] = {apart.data};
      void* in_place[] = {first.data};
      require(elastic_reduce(set, dtype, 1, elsewhere, 1, sources, n, length, 0.25, 3.0) == 0, "a long sum");
      require(elastic_reduce(set, dtype, 1, in_place, 1, sources, n, length, 0.25, 3.0) == 0, "the same in place");
      require(std::memcmp(apart.data, first.data, length * width) == 0, "the same bits elsewhere");
    }
  }
}

// As in a group: each thread reduces its own chunk of all buffers, and the chunks are adjacent.
void share_buffers(const char* set) {
  constexpr int kThreads = 4;
  constexpr size_t kChunk = 37;
  for (int dtype = 0; dtype < kDTypes; ++dtype) {
    const size_t width = elastic::element_bytes(static_cast<elastic::DType>(dtype));
    Elements one(kThreads * kChunk * width, 0), other(kThreads * kChunk * width, width);
    std::vector<std::thread> threads;
    for (size_t chunk = 0; chunk < kThreads; ++chunk) {
      threads.emplace_back([&, chunk] {
        void* places[] = {one.data + chunk * kChunk * width, other.data + chunk * kChunk * width};
        const void* sources[] = {places[0], places[1]};
        require(elastic_reduce(set, dtype, 3, places, 2, sources, 2, kChunk, 1.0, 1.0) == 0, "a chunk");
      });
    }
    for (std::thread& thread : threads) thread.join();
    require(std::memcmp(one.data, other.data, kThreads * kChunk * width) == 0, "chunks of several threads");
  }
}

}  // namespace

int main() {
  int sets = 0;
  for (const char* set : kSets) {
    if (!runs(set)) continue;
    stay_within(set);
    sum_as_a_loop_does(set);
    add_up_elsewhere(set);
    share_buffers(set);
    ++sets;
  }
  require(sets > 0 && runs(elastic_kernels_name()), "a set that runs here");
  require(elastic_reduce(nullptr, 99, 1, nullptr, 0, nullptr, 1, 0, 1.0, 1.0) == -1, "an unknown dtype is refused");
  std::printf("%d sets, %s in use\n", sets, elastic_kernels_name());
  return 0;
}
