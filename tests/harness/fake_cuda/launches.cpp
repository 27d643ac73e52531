// Launches of real kernels. There is nothing that could run them: one refuses, and says which it was. Those of torch's
// operators are not launched at all where operators.cpp has taken their place.
#include <chrono>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "faults.h"
#include "runtime.h"

namespace {

std::mutex& lock = *new std::mutex;
std::map<const void*, std::string>& names = *new std::map<const void*, std::string>;

cudaError_t launch(const void* function, void** arguments, cudaStream_t stream) {
  std::string name;
  {
    std::lock_guard<std::mutex> guard(lock);
    name = names[function];
  }
  // torch.cuda._sleep: a cycle is a nanosecond.
  if (name.find("spin_kernel") != std::string::npos) {
    const auto cycles = *static_cast<const int64_t*>(arguments[0]);
    return fake::enqueue(stream, [cycles] { std::this_thread::sleep_for(std::chrono::nanoseconds(cycles)); });
  }
  if (cudaError_t error = fake::enter()) return error;
  fake::shout("the kernel %s is not made up", name.c_str());
  return fake::told(cudaErrorNotSupported);
}

thread_local std::vector<std::tuple<dim3, dim3, size_t, void*>> configurations;

}  // namespace

CUDA_API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*,
                                     void*, void*, void*, int*) {
  std::lock_guard<std::mutex> guard(lock);
  names[function] = name;
}

CUDA_API void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
CUDA_API void __cudaRegisterFatBinaryEnd(void**) {}
CUDA_API void __cudaUnregisterFatBinary(void**) {}
CUDA_API char __cudaInitModule(void**) { return 1; }
CUDA_API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

CUDA_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configurations.emplace_back(grid, block, shared, stream);
  return 0;
}

CUDA_API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  std::tie(*grid, *block, *shared, *static_cast<void**>(stream)) = configurations.back();
  configurations.pop_back();
  return cudaSuccess;
}

CUDA_API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t,
                                      cudaStream_t stream) {
  return launch(function, arguments, stream);
}

CUDA_API cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void** arguments,
                                                 size_t, cudaStream_t stream) {
  return launch(function, arguments, stream);
}

CUDA_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                         void** arguments) {
  return launch(function, arguments, config->stream);
}

CUDA_API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

CUDA_API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t,
                                        cudaStream_t stream) {
  return launch(kernel, arguments, stream);
}

CUDA_API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

CUDA_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int,
                                                                            size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
