#include "crc32.h"

#include <array>
#include <cstddef>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// Bit 31 is the coefficient of x^0: polynomials are stored in reverse here.
constexpr uint32_t kPolynomial = 0xedb88320, kOne = 0x80000000;

using Tables = std::array<std::array<uint32_t, 256>, 8>;

Tables tables() {
  Tables made{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) rest = rest >> 1 ^ (rest & 1 ? kPolynomial : 0);
    made[0][byte] = rest;
  }
  for (size_t table = 1; table < made.size(); ++table) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t rest = made[table - 1][byte];
      made[table][byte] = rest >> 8 ^ made[0][rest & 0xff];
    }
  }
  return made;
}

// The state is the CRC-32 with all bits flipped. Eight bytes at a time, each through a separate table.
uint32_t by_tables(uint32_t state, const unsigned char* from, uint64_t bytes) {
  static const Tables of = tables();
  for (; bytes >= 8; from += 8, bytes -= 8) {
    const uint32_t low = state ^ (from[0] | from[1] << 8 | from[2] << 16 | static_cast<uint32_t>(from[3]) << 24);
    state = of[7][low & 0xff] ^ of[6][low >> 8 & 0xff] ^ of[5][low >> 16 & 0xff] ^ of[4][low >> 24] ^ of[3][from[4]] ^
            of[2][from[5]] ^ of[1][from[6]] ^ of[0][from[7]];
  }
  for (; bytes > 0; ++from, --bytes) state = state >> 8 ^ of[0][(state ^ *from) & 0xff];
  return state;
}

#if defined(__x86_64__)
// Values of x^k modulo the polynomial, for the distances over which blocks of 16 bytes are carried: 64 bytes and 16
// bytes. From V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction".
constexpr long long kBy64[] = {0x0154442bd4, 0x01c6e41596}, kBy16[] = {0x01751997d0, 0x00ccaa009e};
constexpr uint64_t kFolded = 64;  // bytes, at least

__attribute__((target("pclmul"))) __m128i carried(__m128i block, __m128i by, __m128i onto) {
  const __m128i low = _mm_clmulepi64_si128(block, by, 0x00), high = _mm_clmulepi64_si128(block, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), onto);
}

constexpr uintptr_t kAhead = 1024;  // bytes; prefetch distance

// All but the last 16 bytes are carried forward; the rest has the same remainder. Also copies everything to `to`,
// unless that is null.
template <bool kCopies>
__attribute__((target("pclmul"))) uint32_t by_folding(uint32_t state, char* to, const char* from, uint64_t bytes) {
  const auto next = [&] {
    const __m128i block = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    if (kCopies) _mm_storeu_si128(reinterpret_cast<__m128i*>(to), block), to += 16;
    from += 16, bytes -= 16;
    return block;
  };
  __m128i a = _mm_xor_si128(next(), _mm_cvtsi32_si128(static_cast<int>(state))), b = next(), c = next(), d = next();
  const __m128i by64 = _mm_set_epi64x(kBy64[1], kBy64[0]), by16 = _mm_set_epi64x(kBy16[1], kBy16[0]);
  while (bytes >= 64) {
    // Prefetching a line past the end is allowed: it reads nothing and never faults.
    _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(from) + kAhead), _MM_HINT_NTA);
    a = carried(a, by64, next()), b = carried(b, by64, next());
    c = carried(c, by64, next()), d = carried(d, by64, next());
  }
  a = carried(carried(carried(a, by16, b), by16, c), by16, d);
  while (bytes >= 16) a = carried(a, by16, next());
  unsigned char left[16];
  std::memcpy(left, &a, sizeof left);
  if (kCopies) std::memcpy(to, from, bytes);
  return by_tables(by_tables(0, left, sizeof left), reinterpret_cast<const unsigned char*>(from), bytes);
}

bool folds() {
  static const bool found = __builtin_cpu_supports("pclmul");
  return found;
}
#endif

uint32_t product(uint32_t one, uint32_t other) {
  uint32_t sum = 0;
  for (; one != 0; one <<= 1) {
    if (one & kOne) sum ^= other;
    other = other >> 1 ^ (other & 1 ? kPolynomial : 0);
  }
  return sum;
}

}  // namespace

namespace elastic {

uint32_t crc32_of_both(uint32_t first, uint32_t second, uint64_t bytes) {
  uint32_t power = kOne >> 8;  // x^8: one byte further
  for (; bytes != 0; bytes >>= 1, power = product(power, power)) {
    if (bytes & 1) first = product(first, power);
  }
  return first ^ second;
}

uint32_t crc32(uint32_t before, const void* from, uint64_t bytes) {
#if defined(__x86_64__)
  if (bytes >= kFolded && folds()) return ~by_folding<false>(~before, nullptr, static_cast<const char*>(from), bytes);
#endif
  return ~by_tables(~before, static_cast<const unsigned char*>(from), bytes);
}

uint32_t crc32_copied(uint32_t before, void* to, const void* from, uint64_t bytes) {
#if defined(__x86_64__)
  if (bytes >= kFolded && folds())
    return ~by_folding<true>(~before, static_cast<char*>(to), static_cast<const char*>(from), bytes);
#endif
  if (bytes > 0) std::memcpy(to, from, bytes);
  return crc32(before, to, bytes);
}

}  // namespace elastic
