// zlib's CRC-32, at memory speed if the processor multiplies polynomials. Nothing blocks or fails.
#pragma once

#include <cstdint>

namespace elastic {

// CRC-32 of bytes that follow bytes with the CRC-32 `before`; 0 if there are none before.
uint32_t crc32(uint32_t before, const void* from, uint64_t bytes);

// The same, and copies the bytes. The blocks of memory must not overlap.
uint32_t crc32_copied(uint32_t before, void* to, const void* from, uint64_t bytes);

// CRC-32 of two consecutive blocks. `bytes`: length of the second.
uint32_t crc32_of_both(uint32_t first, uint32_t second, uint64_t bytes);

}  // namespace elastic
