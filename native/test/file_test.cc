// CRC-32 compared with the definition, and a file that is written in various pieces: its bytes, its sums. Fails by its
// exit status. Run under the sanitizers by `make sanitize`.
#include "file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "crc32.h"

namespace {

void check(bool good, const char* what, size_t number) {
  if (good) return;
  std::fprintf(stderr, "%s: %zu\n", what, number);
  std::abort();
}

uint32_t by_definition(const unsigned char* from, size_t bytes) {
  uint32_t state = ~0u;
  for (size_t i = 0; i < bytes; ++i) {
    state ^= from[i];
    for (int bit = 0; bit < 8; ++bit) state = state >> 1 ^ (state & 1 ? 0xedb88320 : 0);
  }
  return ~state;
}

std::vector<unsigned char> drawn(size_t bytes) {
  std::vector<unsigned char> made(bytes);
  uint32_t number = 12345;
  for (auto& each : made) each = static_cast<unsigned char>((number = number * 1664525 + 1013904223) >> 24);
  return made;
}

void sums() {
  for (size_t bytes : {0, 1, 7, 8, 15, 16, 63, 64, 65, 79, 80, 127, 128, 129, 200, 1000, 4097}) {
    for (size_t offset : {0, 1, 9}) {
      // of exactly this size: a sanitizer detects reads past the end
      const auto all = drawn(offset + bytes);
      const unsigned char* from = all.data() + offset;
      const uint32_t whole = by_definition(from, bytes);
      check(elastic::crc32(0, from, bytes) == whole, "CRC-32", bytes);
      std::vector<unsigned char> copy(bytes + 1);
      check(elastic::crc32_copied(0, copy.data(), from, bytes) == whole, "CRC-32 of a copy", bytes);
      check(std::equal(from, from + bytes, copy.data()), "copy", bytes);
      const size_t half = bytes / 3;
      const uint32_t first = elastic::crc32(0, from, half), second = elastic::crc32(0, from + half, bytes - half);
      check(elastic::crc32(first, from + half, bytes - half) == whole, "the rest", bytes);
      check(elastic::crc32_of_both(first, second, bytes - half) == whole, "of both", bytes);
    }
  }
}

void file() {
  char name[] = "/tmp/elastic-file-XXXXXX";
  const int fd = mkstemp(name);
  check(fd >= 0, "mkstemp", 0);
  std::unique_ptr<void, void (*)(void*)> buffer(std::aligned_alloc(4096, kElasticBlock), std::free);
  elastic_file made{fd, 0, buffer.get(), 0};
  const auto all = drawn(2 * size_t{kElasticBlock} + 77);
  uint32_t crc = 0, blocks[3] = {};
  size_t full = 0, at = 0;
  for (size_t piece : {size_t{1}, size_t{100}, size_t{kElasticBlock}, size_t{0}, all.size() - kElasticBlock - 101}) {
    const size_t before = made.filled;
    check(elastic_file_write(&made, all.data() + at, piece, &crc, blocks + full) == 0, "write", piece);
    full += (before + piece) / kElasticBlock, at += piece;
  }
  check(full == 2 && made.filled == 77, "blocks", full);
  check(crc == elastic::crc32(0, all.data(), all.size()), "CRC-32 of all", 0);
  for (size_t block = 0; block < 2; ++block)
    check(blocks[block] == elastic::crc32(0, all.data() + block * kElasticBlock, kElasticBlock), "sum of block", block);
  check(made.sum == elastic::crc32(0, all.data() + 2 * size_t{kElasticBlock}, 77), "sum of the rest", 0);
  std::vector<unsigned char> found(2 * size_t{kElasticBlock});
  check(pread(fd, found.data(), found.size(), 0) == static_cast<ssize_t>(found.size()), "read", 0);
  check(std::memcmp(found.data(), all.data(), found.size()) == 0, "content", 0);
  close(fd);
  check(elastic_file_write(&made, all.data(), kElasticBlock, &crc, blocks) == EBADF, "closed", 0);
  unlink(name);
}

}  // namespace

int main() {
  sums();
  file();
}
