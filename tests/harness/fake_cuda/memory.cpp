// Memory and copies of the made-up CUDA runtime: a device's memory is memory of this process.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "faults.h"
#include "runtime.h"

namespace fake {

namespace {

struct Block {
  size_t bytes;
  int device;
};

std::mutex& lock = *new std::mutex;
using Blocks = std::map<const char*, Block>;
Blocks& on_device = *new Blocks;
Blocks& freed = *new Blocks;  // nothing else ever lies there: the addresses stay taken, without memory
Blocks& pinned = *new Blocks;

Blocks::iterator around(Blocks& blocks, const void* at) {
  auto found = blocks.upper_bound(static_cast<const char*>(at));
  if (found == blocks.begin()) return blocks.end();
  --found;
  return static_cast<const char*>(at) < found->first + found->second.bytes ? found : blocks.end();
}

void copy(int device, void* to, const void* from, size_t bytes) {
  if (is_device_memory(from) != is_device_memory(to)) suffer("copy", device, bytes);
  if (is_device_memory(from) && is_pinned(to)) suffer("fetch", device, bytes);
  if (spoilt(device) != cudaSuccess) return;
  if (may_use(device, to, bytes) && may_use(device, from, bytes)) memmove(to, from, bytes);
}

// Copies of pageable memory are through when the call returns.
bool asynchronous(const void* at) { return is_device_memory(at) || is_pinned(at); }

cudaError_t waited(cudaStream_t stream) {
  count(Count::synchronizations);
  return stream_of(stream)->wait();
}

void count_copy(size_t bytes) {
  count(Count::copies);
  count(Count::copied_bytes, bytes);
}

}  // namespace

bool is_device_memory(const void* at) {
  std::lock_guard<std::mutex> guard(lock);
  return around(on_device, at) != on_device.end();
}

bool is_pinned(const void* at) {
  std::lock_guard<std::mutex> guard(lock);
  return around(pinned, at) != pinned.end();
}

bool may_use(int device, const void* at, size_t bytes) {
  if (bytes == 0) return true;
  bool past_its_end = false, gone = false;
  {
    std::lock_guard<std::mutex> guard(lock);
    auto found = around(on_device, at);
    if (found != on_device.end())
      past_its_end = static_cast<const char*>(at) + bytes > found->first + found->second.bytes;
    else
      gone = around(freed, at) != freed.end();
  }
  if (past_its_end) spoil(device, cudaErrorIllegalAddress, "memory past the end of an allocation was used");
  if (gone) spoil(device, cudaErrorIllegalAddress, "freed memory was used");
  return !past_its_end && !gone;
}

}  // namespace fake

using namespace fake;

// The bytes that this process has on its devices, and pinned: for tests.
CUDA_API unsigned long fake_cuda_bytes(bool on_devices) {
  std::lock_guard<std::mutex> guard(lock);
  unsigned long total = 0;
  for (const auto& [at, block] : on_devices ? on_device : pinned) total += block.bytes;
  return total;
}

CUDA_API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  if (cudaError_t error = enter()) return error;
  *total = static_cast<size_t>(setting("FAKE_GPU_MB", 16384)) << 20;
  size_t used = 0;
  std::lock_guard<std::mutex> guard(lock);
  for (const auto& [at, block] : on_device)
    if (block.device == current_device()) used += block.bytes;
  *free_bytes = used < *total ? *total - used : 0;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaMalloc(void** at, size_t bytes) {
  count(Count::allocations);
  if (cudaError_t error = enter()) return error;
  size_t free_bytes = 0, total = 0;
  cudaMemGetInfo(&free_bytes, &total);
  bytes = (bytes + 511) / 512 * 512;
  if (bytes > free_bytes) return cudaErrorMemoryAllocation;
  bytes = bytes ? bytes : 512;
  *at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*at == MAP_FAILED) return cudaErrorMemoryAllocation;
  memset(*at, 0xC5, bytes);  // what nobody has written yet must not look like zeros
  std::lock_guard<std::mutex> guard(lock);
  on_device[static_cast<char*>(*at)] = {bytes, current_device()};
  return cudaSuccess;
}

// Waits for the device, as cudaFree does.
CUDA_API cudaError_t cudaFree(void* at) {
  if (cudaError_t error = enter()) return error;
  if (!at) return cudaSuccess;
  int device = 0;
  {
    std::lock_guard<std::mutex> guard(lock);
    auto found = on_device.find(static_cast<char*>(at));
    if (found == on_device.end()) return cudaErrorInvalidValue;
    device = found->second.device;
  }
  cudaError_t error = wait_for_all_streams(device);
  std::lock_guard<std::mutex> guard(lock);
  auto found = on_device.find(static_cast<char*>(at));
  mmap(at, found->second.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  freed.insert(*found);
  on_device.erase(found);
  return error;
}

CUDA_API cudaError_t cudaHostAlloc(void** at, size_t bytes, unsigned) {
  if (cudaError_t error = enter()) return error;
  bytes = (bytes + 4095) / 4096 * 4096;
  *at = aligned_alloc(4096, bytes ? bytes : 4096);
  std::lock_guard<std::mutex> guard(lock);
  pinned[static_cast<char*>(*at)] = {bytes, current_device()};
  size_t total = 0;
  for (const auto& [start, block] : pinned) total += block.bytes;
  log("%.3f MB pinned, %.3f MB in all", bytes / 1e6, total / 1e6);
  return cudaSuccess;
}

CUDA_API cudaError_t cudaFreeHost(void* at) {
  std::lock_guard<std::mutex> guard(lock);
  if (!pinned.erase(static_cast<char*>(at))) return cudaErrorInvalidValue;
  free(at);
  return cudaSuccess;
}

CUDA_API cudaError_t cudaHostRegister(void* at, size_t bytes, unsigned) {
  if (cudaError_t error = enter()) return error;
  std::lock_guard<std::mutex> guard(lock);
  pinned[static_cast<char*>(at)] = {bytes, current_device()};
  return cudaSuccess;
}

CUDA_API cudaError_t cudaHostUnregister(void* at) {
  std::lock_guard<std::mutex> guard(lock);
  return pinned.erase(static_cast<char*>(at)) ? cudaSuccess : cudaErrorInvalidValue;
}

CUDA_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* at) {
  memset(attributes, 0, sizeof *attributes);
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = -1;
  std::lock_guard<std::mutex> guard(lock);
  for (auto* blocks : {&on_device, &pinned}) {
    auto found = around(*blocks, at);
    if (found == blocks->end()) continue;
    attributes->type = blocks == &pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = found->second.device;
    attributes->devicePointer = const_cast<void*>(at);
  }
  attributes->hostPointer = attributes->type == cudaMemoryTypeDevice ? nullptr : const_cast<void*>(at);
  return cudaSuccess;
}

CUDA_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                     cudaStream_t stream) {
  if (cudaError_t error = enter()) return error;
  const int device = stream_of(stream)->device;
  count_copy(bytes * 2);
  if (cudaError_t error = enqueue(stream, [=] { copy(device, to, from, bytes); })) return error;
  if (!asynchronous(to) || !asynchronous(from)) return waited(stream);
  return cudaSuccess;
}

CUDA_API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, nullptr)) return error;
  return waited(nullptr);
}

CUDA_API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                         cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}

CUDA_API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                       size_t width, size_t height, cudaMemcpyKind,
                                       cudaStream_t stream) {
  if (cudaError_t error = enter()) return error;
  const int device = stream_of(stream)->device;
  count_copy(width * height * 2);
  auto rows = [=] {
    for (size_t row = 0; row < height; row++)
      copy(device, static_cast<char*>(to) + row * to_pitch,
           static_cast<const char*>(from) + row * from_pitch, width);
  };
  if (cudaError_t error = enqueue(stream, rows)) return error;
  if (!asynchronous(to) || !asynchronous(from)) return waited(stream);
  return cudaSuccess;
}

CUDA_API cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  if (cudaError_t error = enter()) return error;
  const int device = stream_of(stream)->device;
  count_copy(bytes);
  return enqueue(stream, [=] {
    if (may_use(device, at, bytes)) memset(at, value, bytes);
  });
}

CUDA_API cudaError_t cudaMemset(void* at, int value, size_t bytes) {
  if (cudaError_t error = cudaMemsetAsync(at, value, bytes, nullptr)) return error;
  return waited(nullptr);
}
