// How the made-up NCCL reduces: rank after rank, rounded to the dtype at each, as a ring does.
#pragma once

#include <cstdint>
#include <cstring>

#include "nccl.h"

namespace fake {

inline size_t width(ncclDataType_t dtype) {
  switch (dtype) {
    case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: return 4;
  }
}

struct Bfloat16 {
  uint16_t bits;
  Bfloat16(float value = 0) {  // rounds to the nearest, ties to even
    uint32_t wide;
    memcpy(&wide, &value, 4);
    const bool nan = (wide & 0x7FFFFFFF) > 0x7F800000;
    bits = nan ? 0x7FC0 : static_cast<uint16_t>((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16);
  }
  operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  }
};

template <class T>
void accumulate(T* into, const T* from, size_t count, ncclRedOp_t op) {
  for (size_t i = 0; i < count; i++) {
    const T a = into[i], b = from[i];
    switch (op) {
      case ncclProd: into[i] = static_cast<T>(a * b); break;
      case ncclMax: into[i] = b > a ? b : a; break;
      case ncclMin: into[i] = b < a ? b : a; break;
      default: into[i] = static_cast<T>(a + b);
    }
  }
}

template <class T>
void divide(T* values, size_t count, int by) {
  for (size_t i = 0; i < count; i++) values[i] = static_cast<T>(values[i] / static_cast<T>(by));
}

template <class T>
void scale(T* values, size_t count, double factor) {
  for (size_t i = 0; i < count; i++) values[i] = static_cast<T>(values[i] * static_cast<T>(factor));
}

// Calls `use` with a pointer of the dtype's type; false where the dtype can't be reduced.
template <class Use>
bool typed(void* at, ncclDataType_t dtype, const Use& use) {
  switch (dtype) {
    case ncclInt8: use(static_cast<int8_t*>(at)); return true;
    case ncclUint8: use(static_cast<uint8_t*>(at)); return true;
    case ncclInt32: use(static_cast<int32_t*>(at)); return true;
    case ncclUint32: use(static_cast<uint32_t*>(at)); return true;
    case ncclInt64: use(static_cast<int64_t*>(at)); return true;
    case ncclUint64: use(static_cast<uint64_t*>(at)); return true;
    case ncclFloat16: use(static_cast<_Float16*>(at)); return true;
    case ncclBfloat16: use(static_cast<Bfloat16*>(at)); return true;
    case ncclFloat32: use(static_cast<float*>(at)); return true;
    case ncclFloat64: use(static_cast<double*>(at)); return true;
    default: return false;
  }
}

inline bool reduce_into(void* into, const void* from, size_t count, ncclDataType_t dtype, ncclRedOp_t op) {
  return typed(into, dtype, [&](auto* values) {
    accumulate(values, static_cast<const std::remove_pointer_t<decltype(values)>*>(from), count, op);
  });
}

// The first step of a premultiplied sum.
inline void multiply(void* values, size_t count, ncclDataType_t dtype, double factor) {
  typed(values, dtype, [&](auto* each) { scale(each, count, factor); });
}

// The last step of an average.
inline void average(void* values, size_t count, ncclDataType_t dtype, int by) {
  typed(values, dtype, [&](auto* each) { divide(each, count, by); });
}

}  // namespace fake
