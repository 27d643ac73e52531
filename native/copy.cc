#include "copy.h"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

#if defined(__SSE2__)
constexpr size_t kLine = 64;  // bytes of a cache line
constexpr size_t kAhead = 1024;  // bytes; prefetch distance of the sources
constexpr size_t kShort = 1024;  // bytes; up to here streaming is slower

void copy_past_caches(char* to, const char* from, size_t bytes) {
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  std::memcpy(to, from, head);
  to += head, from += head, bytes -= head;
  for (; bytes >= kLine; to += kLine, from += kLine, bytes -= kLine) {
    // Prefetching a line past the end is allowed: it reads nothing and never faults.
    _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(from) + kAhead), _MM_HINT_NTA);
    const __m128i* source = reinterpret_cast<const __m128i*>(from);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    __m128i* destination = reinterpret_cast<__m128i*>(to);
    _mm_stream_si128(destination, a);
    _mm_stream_si128(destination + 1, b);
    _mm_stream_si128(destination + 2, c);
    _mm_stream_si128(destination + 3, d);
  }
  std::memcpy(to, from, bytes);
}
#endif

}  // namespace

extern "C" void elastic_copy(void* const* destinations, const void* const* sources, const uint64_t* bytes,
                             int32_t count) {
  for (int32_t i = 0; i < count; ++i) {
    char* to = static_cast<char*>(destinations[i]);
    const char* from = static_cast<const char*>(sources[i]);
#if defined(__SSE2__)
    if (bytes[i] > kShort) {
      copy_past_caches(to, from, bytes[i]);
      continue;
    }
#endif
    if (bytes[i] > 0) std::memcpy(to, from, bytes[i]);
  }
#if defined(__SSE2__)
  _mm_sfence();  // no other instruction orders streamed stores, not even a lock
#endif
}
