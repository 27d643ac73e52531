// Copies of many tensors at once for a commit: past the caches, because nobody reads them before the next failure.
//
// An ordinary copy reads each line of the destination before it writes it, and throws out of the caches what training
// needs next. No memory is allocated or kept, nothing blocks, nothing fails.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
// Copies bytes[i] bytes from sources[i] to destinations[i], for all i < count. Blocks of memory must not overlap, and
// may have any alignment. When it returns, every thread that is told so sees the copies.
void elastic_copy(void* const* destinations, const void* const* sources, const uint64_t* bytes, int32_t count);
}
