// Copies of many tensors for a commit. They bypass the caches, because the copies are only read after a failure.
//
// An ordinary copy reads each line of the destination before it writes it, and evicts data that training
// needs next from the caches. No memory is allocated or kept; nothing blocks or fails.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
// Copies bytes[i] bytes from sources[i] to destinations[i], for all i < count. Blocks of memory must not overlap, and
// may have any alignment. After the return, the copies are visible to every thread that synchronizes with this one.
void elastic_copy(void* const* destinations, const void* const* sources, const uint64_t* bytes, int32_t count);
}
