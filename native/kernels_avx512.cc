// AVX-512 with its extensions F, BW, DQ and VL.
#define ELASTIC_SET avx512
#define ELASTIC_VECTOR_BYTES 64
#include "kernels_set.inc"
