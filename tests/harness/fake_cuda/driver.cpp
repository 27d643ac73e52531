// The few functions of the CUDA driver that torch uses without a kernel: it asks which devices have a context, so as not to
// make one by asking.
#include "runtime.h"

CUDA_API int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = fake::has_context(device);
  return 0;
}

CUDA_API int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
