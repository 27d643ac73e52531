// Copies that bypass the caches: every length around a line and the streaming limit, every alignment of both sides, and
// nothing outside of the destination. Fails by its exit status. Run under the sanitizers by `make sanitize`.
#include "copy.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr size_t kMargin = 64;

void check(bool good, size_t bytes, size_t from, size_t to) {
  if (good) return;
  std::fprintf(stderr, "%zu bytes from offset %zu to offset %zu\n", bytes, from, to);
  std::abort();
}

void copies(size_t bytes, size_t from, size_t to) {
  // Of exactly this size: the sanitizer detects reads past the end.
  std::vector<unsigned char> source(from + bytes), room(to + bytes + kMargin, 0xee);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<unsigned char>(i * 131 + 7);
  void* destinations[] = {room.data() + to, nullptr};
  const void* sources[] = {source.data() + from, nullptr};
  const uint64_t lengths[] = {bytes, 0};
  elastic_copy(destinations, sources, lengths, 2);
  for (size_t i = 0; i < room.size(); ++i) {
    const bool inside = i >= to && i < to + bytes;
    check(room[i] == (inside ? source[from + i - to] : 0xee), bytes, from, to);
  }
}

}  // namespace

int main() {
  for (size_t bytes : {0, 1, 64, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 70001}) {
    for (size_t from : {0, 1, 8, 63}) {
      for (size_t to : {0, 1, 16, 33, 63}) copies(bytes, from, to);
    }
  }
  return 0;
}
