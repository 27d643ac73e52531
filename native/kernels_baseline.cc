// Instructions of every machine of this architecture: SSE2 on x86-64, NEON on aarch64.
#define ELASTIC_SET baseline
#define ELASTIC_VECTOR_BYTES 16
#include "kernels_set.inc"
