// Streams, events and host functions of the made-up CUDA runtime: a stream is a thread.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "faults.h"
#include "runtime.h"

namespace fake {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kLook = std::chrono::milliseconds(5);  // how often who waits looks whether the device is spoilt

std::mutex& lock = *new std::mutex;
std::vector<Stream*>& streams = *new std::vector<Stream*>;
std::map<int, Stream*>& defaults = *new std::map<int, Stream*>;

Stream* made(int device, int priority) {
  auto* stream = new Stream(device, priority);
  std::lock_guard<std::mutex> guard(lock);
  streams.push_back(stream);
  return stream;
}

std::atomic<long> running{0};

}  // namespace

void suffer(const char* place, int device, size_t bytes) {
  int code = cudaErrorIllegalAddress;
  switch (strike(place, device, -1, bytes, &code)) {
    case Blow::error: spoil(device, static_cast<cudaError_t>(code), "FAKE_FAULTS"); break;
    case Blow::hang: hang();
    case Blow::none: break;
  }
}

Stream::Stream(int device_number, int priority_number) : device(device_number), priority(priority_number) {
  running++;
  std::thread([this] {
    run();
    running--;
  }).detach();
}

void Stream::run() {
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock<std::mutex> guard(mutex_);
      changed_.wait(guard, [this] { return ending_ || !queue_.empty(); });
      if (queue_.empty()) return;
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    suffer("work", device);
    if (spoilt(device) == cudaSuccess) work();
    work = nullptr;  // what it holds is let go before anybody hears that it is done
    {
      std::lock_guard<std::mutex> guard(mutex_);
      done_++;
    }
    changed_.notify_all();
  }
}

void Stream::add(std::function<void()> work) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    queue_.push_back(std::move(work));
    added_++;
  }
  changed_.notify_all();
}

bool Stream::idle() {
  std::lock_guard<std::mutex> guard(mutex_);
  return done_ == added_;
}

cudaError_t Stream::wait() {
  std::unique_lock<std::mutex> guard(mutex_);
  const unsigned long until = added_;
  while (done_ < until && spoilt(device) == cudaSuccess) changed_.wait_for(guard, kLook);
  return spoilt(device);
}

void Stream::end() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
}

Stream* stream_of(cudaStream_t handle) {
  if (reinterpret_cast<uintptr_t>(handle) > 2) return reinterpret_cast<Stream*>(handle);
  const int device = current_device();
  std::lock_guard<std::mutex> guard(lock);
  auto& found = defaults[device];
  if (!found) {
    found = new Stream(device, 0);
    streams.push_back(found);
  }
  return found;
}

cudaError_t enqueue(cudaStream_t handle, std::function<void()> work) {
  if (cudaError_t error = enter()) return error;
  auto* stream = stream_of(handle);
  if (cudaError_t error = spoilt(stream->device)) return error;
  stream->add(std::move(work));
  return cudaSuccess;
}

cudaError_t wait_for_all_streams(int device) {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> guard(lock);
    all = streams;
  }
  for (Stream* stream : all)
    if (stream->device == device) stream->wait();
  return spoilt(device);
}

namespace {

// One call of cudaEventRecord. A wait is for the record that was the newest at the call of the wait: a later record, on
// another stream, may be reached first.
struct Record {
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;
  int device = 0;
  Clock::time_point at;

  cudaError_t wait(int waiter) {
    std::unique_lock<std::mutex> guard(mutex);
    while (!reached) {
      if (cudaError_t error = spoilt(waiter)) return error;
      if (cudaError_t error = spoilt(device)) return error;
      changed.wait_for(guard, kLook);
    }
    return cudaSuccess;
  }
};

struct Event {
  std::mutex mutex;
  std::shared_ptr<Record> newest;  // null until the first record
  int device = 0;
};

Event& event_of(cudaEvent_t handle) { return *reinterpret_cast<Event*>(handle); }

// Streams keep the record, so that its event may be destroyed before they reach it.
std::shared_ptr<Record> newest(cudaEvent_t handle) {
  Event& event = event_of(handle);
  std::lock_guard<std::mutex> guard(event.mutex);
  return event.newest;
}

int device_of(cudaEvent_t handle) {
  Event& event = event_of(handle);
  std::lock_guard<std::mutex> guard(event.mutex);
  return event.device;
}

// How often torch's watchdog asks depends on the time alone.
void count_query() {
  static thread_local const bool watchdog = [] {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    return !strcmp(name, "pt_nccl_watchdg");
  }();
  if (!watchdog) count(Count::queries);
}

}  // namespace

}  // namespace fake

using namespace fake;

// The threads of streams that this process has now: for tests.
CUDA_API long fake_cuda_streams() { return running; }

CUDA_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  if (cudaError_t error = enter()) return error;
  *stream = reinterpret_cast<cudaStream_t>(made(current_device(), std::clamp(priority, -5, 0)));
  return cudaSuccess;
}

CUDA_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

CUDA_API cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

CUDA_API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  stream_of(stream)->end();
  return cudaSuccess;
}

CUDA_API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  count_query();
  if (cudaError_t error = enter()) return error;
  auto* stream = stream_of(handle);
  if (cudaError_t error = spoilt(stream->device)) return error;
  return stream->idle() ? cudaSuccess : cudaErrorNotReady;
}

CUDA_API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  count(Count::synchronizations);
  if (cudaError_t error = enter()) return error;
  return stream_of(stream)->wait();
}

CUDA_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  if (cudaError_t error = enter()) return error;
  auto* made_event = new Event;
  made_event->device = current_device();
  *event = reinterpret_cast<cudaEvent_t>(made_event);
  return cudaSuccess;
}

CUDA_API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

CUDA_API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &event_of(event);
  return cudaSuccess;
}

CUDA_API cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  count(Count::events);
  if (cudaError_t error = enter()) return error;
  auto record = std::make_shared<Record>();
  record->device = stream_of(stream)->device;
  {
    Event& event = event_of(handle);
    std::lock_guard<std::mutex> guard(event.mutex);
    event.newest = record;
    event.device = record->device;
  }
  return enqueue(stream, [record] {
    {
      std::lock_guard<std::mutex> guard(record->mutex);
      record->reached = true;
      record->at = Clock::now();
    }
    record->changed.notify_all();
  });
}

CUDA_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

CUDA_API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  count_query();
  if (cudaError_t error = enter()) return error;
  auto record = newest(handle);
  if (cudaError_t error = spoilt(device_of(handle))) return error;
  if (!record) return cudaSuccess;
  std::lock_guard<std::mutex> guard(record->mutex);
  return record->reached ? cudaSuccess : cudaErrorNotReady;
}

CUDA_API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  count(Count::synchronizations);
  if (cudaError_t error = enter()) return error;
  auto record = newest(handle);
  return record ? record->wait(record->device) : cudaSuccess;
}

CUDA_API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned) {
  count(Count::stream_waits);
  auto record = newest(handle);
  if (!record) return cudaSuccess;
  const int device = stream_of(stream)->device;
  return enqueue(stream, [record, device] { record->wait(device); });
}

CUDA_API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  auto from = newest(begin), to = newest(end);
  if (!from || !to) return cudaErrorInvalidResourceHandle;
  *ms = std::chrono::duration<float, std::milli>(to->at - from->at).count();
  return cudaSuccess;
}

CUDA_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  return enqueue(stream, [function, argument] { function(argument); });
}

CUDA_API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function,
                                           void* argument, unsigned) {
  return enqueue(stream, [=] { function(stream, cudaSuccess, argument); });
}

CUDA_API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                              unsigned long long* id, cudaGraph_t*,
                                              const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                              size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
