// zlib's CRC-32, at the speed of memory where the processor multiplies polynomials. Nothing blocks, nothing fails.
#pragma once

#include <cstdint>

namespace elastic {

// Of bytes that follow those whose CRC-32 is `before`; 0 where none do.
uint32_t crc32(uint32_t before, const void* from, uint64_t bytes);

// The same of bytes that are copied on the way. The blocks of memory must not overlap.
uint32_t crc32_copied(uint32_t before, void* to, const void* from, uint64_t bytes);

// Of two blocks of bytes, one after the other. `bytes`: of the second.
uint32_t crc32_of_both(uint32_t first, uint32_t second, uint64_t bytes);

}  // namespace elastic
