#include "file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "crc32.h"

namespace {

// bytes; still in the nearest cache when copy and sum are separate passes
constexpr uint64_t kPiece = 16 << 10;

#if defined(O_DIRECT)
bool through_the_cache(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  return flags >= 0 && (flags & O_DIRECT) && fcntl(fd, F_SETFL, flags & ~O_DIRECT) == 0;
}
#else
bool through_the_cache(int) { return false; }
#endif

int32_t write_all(int fd, const char* from, uint64_t bytes) {
  while (bytes > 0) {
    const ssize_t written = write(fd, from, bytes);
    if (written > 0) {
      from += written, bytes -= written;
    } else if (written == 0) {
      return EIO;
    } else if (errno != EINTR && !((errno == EINVAL || errno == EOPNOTSUPP) && through_the_cache(fd))) {
      return errno;
    }
  }
  return 0;
}

}  // namespace

extern "C" int32_t elastic_file_write(elastic_file* file, const void* from, uint64_t bytes, uint32_t* crc,
                                      uint32_t* sums) {
  const char* source = static_cast<const char*>(from);
  char* buffer = static_cast<char*>(file->buffer);
  while (bytes > 0) {
    const uint64_t now = std::min<uint64_t>(bytes, kElasticBlock - file->filled);
    uint32_t sum = 0;
    for (uint64_t done = 0; done < now; done += kPiece) {
      const uint64_t piece = std::min(now - done, kPiece);
      sum = elastic::crc32_copied(sum, buffer + file->filled + done, source + done, piece);
    }
    *crc = elastic::crc32_of_both(*crc, sum, now);
    file->sum = elastic::crc32_of_both(file->sum, sum, now);
    file->filled += now, source += now, bytes -= now;
    if (file->filled < kElasticBlock) continue;
    const int32_t failed = write_all(file->fd, buffer, kElasticBlock);
    if (failed != 0) return failed;
    *sums++ = file->sum;
    file->sum = 0, file->filled = 0;
  }
  return 0;
}
