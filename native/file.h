// A file that is written past the page cache, with checksums: a checkpoint costs the processor one pass over memory.
//
// The bytes go through one buffer, which stays in the caches: they are copied there, summed there, and written from
// there when it is full. If the file system can't bypass its cache, it is used. Blocks while the disk blocks.
#pragma once

#include <cstdint>

extern "C" {
enum { kElasticBlock = 4 << 20 };  // bytes of the buffer

struct elastic_file {
  int32_t fd;       // at the end of the file
  uint32_t sum;  // CRC-32 of the buffer's content
  void* buffer;     // of kElasticBlock bytes, aligned to a page
  uint64_t filled;  // bytes in it
};

// Adds bytes to the file, and their CRC-32 to `crc` as a continuation. `sums` has room for the CRC-32 of each block
// that becomes full and is written. Returns 0, or the errno of a failed write; the file must not be used afterwards.
int32_t elastic_file_write(elastic_file* file, const void* from, uint64_t bytes, uint32_t* crc, uint32_t* sums);
}
