// AVX2 and F16C: x86-64 since 2013.
#define ELASTIC_SET avx2
#define ELASTIC_VECTOR_BYTES 32
#include "kernels_set.inc"
