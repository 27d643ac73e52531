// What the parts of the made-up CUDA runtime know of each other. The made-up NCCL and the kernels use it, too: all of it is
// exported by libcudart.
//
// A device is a number, its memory is memory of this process, and a stream is a thread that does one thing after another.
#pragma once

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <string>

#define CUDA_API extern "C" __attribute__((visibility("default")))
#define FAKE_API __attribute__((visibility("default")))

namespace fake {

// ---- devices ---------------------------------------------------------------------------------------------------------

FAKE_API int device_count();
FAKE_API int current_device();                // of this thread
FAKE_API std::string identity(int device);    // "host/number": the same for two processes that see the same GPU
FAKE_API bool has_context(int device);

// Nearly every call begins so: it makes the current device's context if there is none, as CUDA does, and returns the
// device's error if it has one. Such an error stays: the context can't be saved.
FAKE_API cudaError_t enter();
FAKE_API cudaError_t told(cudaError_t error);  // returns it, and cudaGetLastError will, too
FAKE_API cudaError_t spoilt(int device);
FAKE_API void spoil(int device, cudaError_t error, const char* why);

// ---- counts ----------------------------------------------------------------------------------------------------------

// What this process has asked for so far, by any thread: see counts() in worker/fake_cuda.py. Bytes are those that a real
// GPU would read and write for it.
enum class Count {
  launches,
  launched_bytes,
  copies,  // by the runtime, without a kernel
  copied_bytes,
  synchronizations,  // calls that return when the GPU has come there
  queries,           // of events and streams, without those of torch's watchdog
  events,            // recorded
  stream_waits,      // of one stream for an event of another
  allocations,
  collectives,
  collective_bytes,
  end
};
FAKE_API void count(Count what, unsigned long many = 1);

// ---- streams ---------------------------------------------------------------------------------------------------------

class Stream {
 public:
  Stream(int device, int priority);
  void add(std::function<void()> work);
  bool idle();
  cudaError_t wait();  // until all that was added before has been done, or the device is spoilt
  void end();          // the thread goes once all has been done; the object stays
  const int device;
  const int priority;

 private:
  void run();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  unsigned long added_ = 0, done_ = 0;
  bool ending_ = false;
};

// The current device's default stream for 0 and the two special handles.
FAKE_API Stream* stream_of(cudaStream_t handle);
FAKE_API cudaError_t enqueue(cudaStream_t handle, std::function<void()> work);
cudaError_t wait_for_all_streams(int device);

// In the thread of a stream: what FAKE_FAULTS has for this place.
void suffer(const char* place, int device, size_t bytes = 0);

// ---- memory ----------------------------------------------------------------------------------------------------------

FAKE_API bool is_device_memory(const void* at);
bool is_pinned(const void* at);

// Called when work on `device` is about to use memory: what is not allocated (any more) spoils the device, as a kernel's
// illegal access does. Memory that was never a device's is the host's, and not looked at.
FAKE_API bool may_use(int device, const void* at, size_t bytes);

}  // namespace fake
