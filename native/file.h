// A file that is written past the page cache, checksummed on the way: what the bytes of a checkpoint take of the processor
// is one pass over memory.
//
// They go through one buffer, which stays in the caches: copied there, summed there, and written from there when it is
// full. Where the file system can't write past its cache, it writes through it. Blocks while the disk does.
#pragma once

#include <cstdint>

extern "C" {
enum { kElasticBlock = 4 << 20 };  // bytes, of the buffer

struct elastic_file {
  int32_t fd;       // at the end of the file
  uint32_t sum;     // CRC-32 of what is in the buffer
  void* buffer;     // of kElasticBlock bytes, aligned to a page
  uint64_t filled;  // bytes in it
};

// Adds bytes to the file, and their CRC-32 to `crc` as if they followed what it is of. `sums`: has room for the CRC-32
// of each block that becomes full, and is written. Returns 0, or the errno of a write that failed: the file is then to
// be given up.
int32_t elastic_file_write(elastic_file* file, const void* from, uint64_t bytes, uint32_t* crc, uint32_t* sums);
}
