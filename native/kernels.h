// Reductions of one chunk. No memory is allocated or kept; nothing blocks or fails.
//
// The same functions are compiled for several sets of vector instructions; `elastic_kernels()` selects the widest that
// this machine supports, once. All of them produce the same bits: elements are combined in the order of the sources,
// one rounding at a time, and never with a fused multiply-add. Only the kind of NaN that results from two NaNs is
// unspecified.
#pragma once

#include <cstddef>
#include <cstdint>

namespace elastic {

enum class DType : int32_t {  // numbered as in elastic/collectives/shared_memory/native_library.py
  kUint8 = 0,
  kInt8 = 1,
  kInt16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kFloat16 = 5,
  kBfloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
};

enum class Op : int32_t {  // Horovod's numbers, as in elastic/collectives/interface.py
  kSum = 1,
  kMin = 3,
  kMax = 4,
  kProduct = 5,
};

constexpr int kMaxRanks = 64;  // of one host in one group

// Bytes of an element; 0 for an unknown dtype.
size_t element_bytes(DType dtype);

// Factor and divisor of a result. The mean of n is a division, because multiplication by 1/n is sometimes off by a bit.
// Without functions, because each set of kernels would have a copy, and the linker takes any of them.
struct Scale {
  double factor = 1.0;
  double divisor = 1.0;
};

// destinations[j][i] = round(scale of (sources[0][i] op sources[1][i] op ...)), for all i < count and all j.
//
// float16 and bfloat16 are combined and scaled in float32 and rounded once, to the nearest even. float32 and float64
// are scaled in their own precision, and unchanged if scale is one. Integers wrap around and ignore scale. MIN and MAX
// of floating point numbers return the quiet, positive NaN if any of several sources has one, and treat -0.0 as less
// than 0.0. A destination may be one of the sources (the same address), but must not overlap one otherwise. Pointers
// are aligned to an element at least. There are 1 .. kMaxRanks sources, and at most kMaxRanks destinations.
using Reduce = void (*)(void* const* destinations, int n_destinations, const void* const* sources, int n_sources,
                        size_t count, Scale scale);

constexpr int kTreeDepth = 16;  // pending values in the evaluation of a tree: one per level

// One step of a sum in a given order: `n` values are added, the first with the second and so on. `from` has for each:
// buffer `word >> 16` at place `word & 0xffff`, or, if negative, the pending value `-1 - word`.
struct Row {
  int32_t n;
  // index of the pending sum; -1: it is the result, is scaled, and replaces every destination
  int32_t into;
  int32_t from[kTreeDepth];
};

// As `Reduce`, row after row: the places of a buffer are `stride` bytes apart. A row of float16 or bfloat16 is rounded
// once.
using SumTree = void (*)(const Row* rows, size_t n_rows, void* const* destinations, int n_destinations,
                         const void* const* buffers, size_t stride, size_t count, Scale scale);

struct Kernels {
  const char* name;  // "avx512", "avx2", "neon", "baseline"
  // The function for a dtype and an op; null for unknown numbers.
  Reduce (*reduce)(DType dtype, Op op);
  SumTree (*sum_tree)(DType dtype);
};

// The widest set that this machine supports; ELASTIC_KERNELS in the environment selects a narrower one (for tests).
const Kernels& kernels();

}  // namespace elastic

extern "C" {
// For tests and diagnostics: as `Reduce`. Returns 0, or -1 for an unknown dtype or op, or for no sources or too many.
// `kind` names a set, null is the one in use; -2: no set of that name runs here.
int elastic_reduce(const char* kind, int32_t dtype, int32_t op, void* const* destinations, int n_destinations,
                   const void* const* sources, int n_sources, size_t count, double factor, double divisor);
const char* elastic_kernels_name(void);
}
