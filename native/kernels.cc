// Selection of the kernels for this machine. See kernels.h.
#include "kernels.h"

#include <cstdlib>
#include <cstring>

namespace elastic {

namespace baseline {
Reduce reduce(DType dtype, Op op);
SumTree sum_tree(DType dtype);
}
namespace avx2 {
Reduce reduce(DType dtype, Op op);
SumTree sum_tree(DType dtype);
}
namespace avx512 {
Reduce reduce(DType dtype, Op op);
SumTree sum_tree(DType dtype);
}

namespace {

struct Set {
  Kernels kernels;
  bool (*runs)();
};

#if defined(__aarch64__)
constexpr const char* kBaseline = "neon";
#else
constexpr const char* kBaseline = "baseline";
#endif

// widest first
const Set kSets[] = {
#if defined(ELASTIC_X86_SETS)
    {{"avx512", avx512::reduce, avx512::sum_tree},
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
     }},
    // Every real processor with AVX2 has F16C, but a virtual machine may hide it.
    {{"avx2", avx2::reduce, avx2::sum_tree},
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }},
#endif
    {{kBaseline, baseline::reduce, baseline::sum_tree}, [] { return true; }},
};

// Null if no set has that name, or this machine can't run it.
const Kernels* named(const char* name) {
  for (const Set& set : kSets) {
    if (std::strcmp(set.kernels.name, name) == 0 && set.runs()) return &set.kernels;
  }
  return nullptr;
}

const Kernels& widest() {
  for (const Set& set : kSets) {
    if (set.runs()) return set.kernels;
  }
  return kSets[0].kernels;  // unreachable: the last one runs everywhere
}

const Kernels& choose() {
  const char* wished = std::getenv("ELASTIC_KERNELS");
  const Kernels* found = wished == nullptr ? nullptr : named(wished);
  return found == nullptr ? widest() : *found;
}

}  // namespace

size_t element_bytes(DType dtype) {
  switch (dtype) {
    case DType::kUint8:
    case DType::kInt8:
      return 1;
    case DType::kInt16:
    case DType::kFloat16:
    case DType::kBfloat16:
      return 2;
    case DType::kInt32:
    case DType::kFloat32:
      return 4;
    case DType::kInt64:
    case DType::kFloat64:
      return 8;
  }
  return 0;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace elastic

int elastic_reduce(const char* kind, int32_t dtype, int32_t op, void* const* destinations, int n_destinations,
                   const void* const* sources, int n_sources, size_t count, double factor, double divisor) {
  using namespace elastic;
  const Kernels* set = kind == nullptr ? &kernels() : named(kind);
  if (set == nullptr) return -2;
  if (n_sources < 1 || n_sources > kMaxRanks || n_destinations < 0 || n_destinations > kMaxRanks) return -1;
  const Reduce reduce = set->reduce(static_cast<DType>(dtype), static_cast<Op>(op));
  if (reduce == nullptr) return -1;
  reduce(destinations, n_destinations, sources, n_sources, count, Scale{factor, divisor});
  return 0;
}

const char* elastic_kernels_name(void) { return elastic::kernels().name; }
