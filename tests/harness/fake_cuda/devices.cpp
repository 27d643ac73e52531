// Devices, contexts and errors of the made-up CUDA runtime.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <sstream>
#include <vector>

#include "faults.h"
#include "runtime.h"

namespace fake {

namespace {

// Never destroyed: threads of streams outlive main.
std::mutex& lock = *new std::mutex;
std::set<int>& contexts = *new std::set<int>;
std::vector<cudaError_t>& errors = *new std::vector<cudaError_t>(64, cudaSuccess);
thread_local int current = 0;
thread_local cudaError_t last = cudaSuccess;
bool forked_with_context = false;

void after_fork() { forked_with_context = !contexts.empty(); }

// The numbers of the host's GPUs that this process sees.
const std::vector<int>& visible() {
  static const auto& devices = *new std::vector<int>([] {
    std::vector<int> found;
    const int all = static_cast<int>(setting("FAKE_GPUS", 2));
    const char* wanted = getenv("CUDA_VISIBLE_DEVICES");
    if (!wanted) {
      for (int i = 0; i < all; i++) found.push_back(i);
      return found;
    }
    std::stringstream stream(wanted);
    for (std::string part; std::getline(stream, part, ',');) {
      char* end = nullptr;
      const long number = strtol(part.c_str(), &end, 10);
      if (end == part.c_str() || number < 0 || number >= all) break;  // CUDA ignores what follows, too
      found.push_back(static_cast<int>(number));
    }
    return found;
  }());
  return devices;
}

void make_context(int device) {
  static const int once = pthread_atfork(nullptr, nullptr, after_fork);
  (void)once;
  std::lock_guard<std::mutex> guard(lock);
  if (contexts.insert(device).second) log("context on device %d", device);
}

}  // namespace

cudaError_t told(cudaError_t error) {
  if (error != cudaSuccess) last = error;
  return error;
}

int device_count() { return static_cast<int>(visible().size()); }
int current_device() { return current; }

std::string identity(int device) {
  const char* host = getenv("FAKE_HOST");
  return std::string(host ? host : "") + "/" + std::to_string(visible().at(device));
}

bool has_context(int device) {
  std::lock_guard<std::mutex> guard(lock);
  return contexts.count(device) != 0;
}

cudaError_t enter() {
  if (device_count() == 0) return told(cudaErrorNoDevice);
  if (forked_with_context) return told(cudaErrorInitializationError);
  make_context(current);
  return told(spoilt(current));
}

cudaError_t spoilt(int device) {
  std::lock_guard<std::mutex> guard(lock);
  return errors.at(device);
}

void spoil(int device, cudaError_t error, const char* why) {
  std::lock_guard<std::mutex> guard(lock);
  if (errors.at(device) != cudaSuccess) return;
  errors.at(device) = error;
  shout("device %d is spoilt: %s: %s", device, cudaGetErrorString(error), why);
}

std::atomic<unsigned long> counted[static_cast<int>(Count::end)];

void count(Count what, unsigned long many) { counted[static_cast<int>(what)] += many; }

}  // namespace fake

using namespace fake;

CUDA_API unsigned long fake_cuda_count(int what) { return counted[what]; }

// The devices this process has a context on, as bits: for tests.
CUDA_API unsigned long fake_cuda_contexts() {
  unsigned long bits = 0;
  for (int device = 0; device < device_count(); device++)
    if (has_context(device)) bits |= 1ul << device;
  return bits;
}

CUDA_API cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return *count ? cudaSuccess : told(cudaErrorNoDevice);
}

CUDA_API cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return told(cudaErrorInvalidDevice);
  current = device;
  return enter();
}

CUDA_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int device) {
  if (device < 0 || device >= device_count()) return told(cudaErrorInvalidDevice);
  memset(prop, 0, sizeof *prop);
  const int number = visible()[device];
  snprintf(prop->name, sizeof prop->name, "made-up GPU %d", number);
  const size_t host = std::hash<std::string>()(identity(device));
  memcpy(prop->uuid.bytes, &host, sizeof host);
  prop->uuid.bytes[15] = static_cast<char>(1 + number);
  prop->totalGlobalMem = setting("FAKE_GPU_MB", 16384) << 20;
  prop->sharedMemPerBlock = 49152;
  prop->sharedMemPerBlockOptin = 232448;
  prop->sharedMemPerMultiprocessor = 233472;
  prop->regsPerBlock = prop->regsPerMultiprocessor = 65536;
  prop->warpSize = 32;
  prop->maxThreadsPerBlock = 1024;
  prop->maxThreadsPerMultiProcessor = 2048;
  for (int i = 0; i < 3; i++) prop->maxThreadsDim[i] = i < 2 ? 1024 : 64;
  for (int i = 0; i < 3; i++) prop->maxGridSize[i] = i ? 65535 : 2147483647;
  prop->major = 9;
  prop->multiProcessorCount = 132;
  prop->l2CacheSize = 50 << 20;
  prop->memoryBusWidth = 5120;
  prop->pciBusID = number + 1;
  prop->asyncEngineCount = 3;
  prop->unifiedAddressing = prop->concurrentKernels = 1;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

CUDA_API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  if (device < 0 || device >= device_count()) return told(cudaErrorInvalidDevice);
  snprintf(text, size, "0000:%02x:00.0", visible()[device] + 1);
  return cudaSuccess;
}

CUDA_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return enter(); }

CUDA_API cudaError_t cudaDeviceSynchronize() {
  count(Count::synchronizations);
  if (cudaError_t error = enter()) return error;
  return told(wait_for_all_streams(current));
}

// An error that stays is told again and again.
CUDA_API cudaError_t cudaPeekAtLastError() {
  const cudaError_t error = device_count() ? spoilt(current) : cudaSuccess;
  return error != cudaSuccess ? error : last;
}

CUDA_API cudaError_t cudaGetLastError() {
  const cudaError_t error = cudaPeekAtLastError();
  last = cudaSuccess;
  return error;
}

CUDA_API const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorAssert: return "cudaErrorAssert";
    case cudaErrorECCUncorrectable: return "cudaErrorECCUncorrectable";
    case cudaErrorNvlinkUncorrectable: return "cudaErrorNvlinkUncorrectable";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorInitializationError: return "cudaErrorInitializationError";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    default: return "cudaErrorUnknown";
  }
}

CUDA_API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorAssert: return "device-side assert triggered";
    case cudaErrorECCUncorrectable: return "uncorrectable ECC error encountered";
    case cudaErrorNvlinkUncorrectable: return "uncorrectable NVLink error detected during the execution";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorInitializationError: return "initialization error";
    case cudaErrorNotSupported: return "operation not supported";
    default: return "unknown error";
  }
}

CUDA_API cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                                      unsigned long long,
                                                      cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  if (result) *result = cudaDriverEntryPointSymbolNotFound;
  return cudaErrorNotSupported;
}
