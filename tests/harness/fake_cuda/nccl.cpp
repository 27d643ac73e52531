// A made-up NCCL for ranks that are processes of one machine. Its rules are NCCL's: a call on a nonblocking communicator is
// in progress for a while, the first collective connects, a kernel spins on its stream until all ranks have come or the
// communicator is aborted, and nobody notices that a peer has died, but in init.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "faults.h"
#include "nccl_reduce.h"
#include "runtime.h"
#include "shared.h"

#define NCCL_API extern "C" __attribute__((visibility("default")))

using namespace fake;

// Counts numbers up to the first one that is missing. Collectives in several streams do not end in order.
class InOrder {
 public:
  void add(uint64_t number, std::atomic<uint64_t>& count) {
    early_.insert(number);
    while (early_.erase(count + 1)) count++;
  }

 private:
  std::set<uint64_t> early_;
};

// Never deleted, only emptied: who has aborted it may still ask for its state.
struct ncclComm {
  std::unique_ptr<Shared> shared;
  int rank = 0, size = 0, device = 0;
  bool blocking = true, connect_early = false, connected = false;
  std::atomic<int> state{ncclSuccess};  // of the last call
  std::atomic<int> error{ncclSuccess};  // asynchronous: stays
  std::atomic<bool> aborted{false}, revoked{false};
  std::atomic<int> busy{0};  // threads and kernels, also those that wait in a stream
  uint64_t collectives = 0, kept_from = 1;
  std::mutex counting;
  InOrder posting, taking;
  std::map<int, uint64_t> sent, received;
  std::string why;

  bool stopped() const { return aborted || revoked; }
};

namespace {

// What a nonblocking call, or a kernel in a stream, holds while it is not over.
std::shared_ptr<void> busy(ncclComm* comm) {
  comm->busy++;
  return std::shared_ptr<void>(nullptr, [comm](void*) { comm->busy--; });
}

// Waits in growing steps: the ranks share few cores.
class Spin {
 public:
  void once() {
    std::this_thread::sleep_for(std::chrono::microseconds(step_));
    step_ = std::min(step_ * 5 / 4 + 1, 500);
  }

 private:
  int step_ = 20;
};

bool gone(uint32_t pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (!std::getline(stat, text)) return true;
  const auto after = text.rfind(')');
  return after != std::string::npos && text.size() > after + 2 && text[after + 2] == 'Z';
}

std::atomic<long> communicators{0};  // that have not been freed

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

ncclResult_t failed(ncclComm* comm, ncclResult_t result, const std::string& why) {
  comm->why = why;
  log("rank %d: %s", comm->rank, why.c_str());
  return result;
}

// ---- init and connect ------------------------------------------------------------------------------------------------

// Until `come` holds of all ranks. The sockets of init and connect close when a process ends: that is noticed.
template <class Come>
ncclResult_t all(ncclComm* comm, const char* what, const Come& come) {
  for (int rank = 0; rank < comm->size; rank++) {
    Seat& seat = comm->shared->seat(rank);
    for (Spin spin; !come(seat); spin.once()) {
      if (comm->aborted) return failed(comm, ncclInternalError, std::string("aborted in ") + what);
      if (seat.pid && gone(seat.pid))
        return failed(comm, ncclRemoteError, std::string(what) + ": rank " + std::to_string(rank) + " is gone");
    }
  }
  return ncclSuccess;
}

ncclResult_t suffer(ncclComm* comm, const char* place) {
  switch (strike(place, comm->device, comm->rank)) {
    case Blow::error: return failed(comm, ncclSystemError, std::string("FAKE_FAULTS at ") + place);
    case Blow::hang: hang();
    case Blow::none: break;
  }
  return ncclSuccess;
}

ncclResult_t connect(ncclComm* comm) {
  if (comm->connected) return ncclSuccess;
  if (auto result = suffer(comm, "connect")) return result;
  comm->shared->seat(comm->rank).connected = 1;
  auto result = all(comm, "connect", [](Seat& seat) { return seat.connected != 0; });
  comm->connected = result == ncclSuccess;
  return result;
}

long version() { return setting("FAKE_NCCL_VERSION", NCCL_VERSION_CODE); }

int ranks_on_one_gpu() { return version() >= NCCL_VERSION(2, 30, 0) && setting("NCCL_MULTI_RANK_GPU_ENABLE", 0) ? 2 : 1; }

ncclResult_t init(ncclComm* comm, double began) {
  Seat& mine = comm->shared->seat(comm->rank);
  mine.pid = static_cast<uint32_t>(getpid());
  if (auto result = suffer(comm, "init")) return result;
  snprintf(mine.gpu, sizeof mine.gpu, "%s", identity(comm->device).c_str());
  mine.arrived = 1;
  if (auto result = all(comm, "init", [](Seat& seat) { return seat.arrived != 0; })) return result;
  for (int a = 0, same; a < comm->size; a++)
    for (int b = same = 0; b < a; b++)
      if (!strcmp(comm->shared->seat(a).gpu, comm->shared->seat(b).gpu) && ++same >= ranks_on_one_gpu())
        return failed(comm, ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(b) + " and rank " +
                                                  std::to_string(a) + " both on CUDA device " + mine.gpu);
  if (comm->connect_early)
    if (auto result = connect(comm)) return result;
  log("rank %d of %d is ready on device %d; init %.8s from %.6f to %.6f", comm->rank, comm->size, comm->device,
      comm->shared->name().c_str(), began, now());
  return ncclSuccess;
}

// Does it here, or in a thread while the communicator is in progress.
ncclResult_t perform(ncclComm* comm, std::function<ncclResult_t()> call) {
  if (comm->blocking) return call();
  comm->state = ncclInProgress;
  std::thread([comm, call, held = busy(comm)]() mutable {
    cudaSetDevice(comm->device);
    const ncclResult_t result = call();
    call = nullptr;
    comm->state = result;
  }).detach();
  return ncclInProgress;
}

// ---- kernels ---------------------------------------------------------------------------------------------------------

// A part of a kernel. First all parts put their data in place, then all wait for others'. False: the kernel ends there.
struct Part {
  ncclComm* comm;
  cudaStream_t stream;
  std::function<bool()> post, finish;
};

bool freeing_is(const char* what) {
  static const char* wanted = getenv("FAKE_NCCL_FREE");
  return wanted && !strcmp(wanted, what);
}

// A peer that has freed its buffers while this kernel has still to write to them, or to read from them.
bool peers_freed(ncclComm* comm) {
  if (freeing_is("harmless")) return false;
  for (int rank = 0; rank < comm->size; rank++)
    if (comm->shared->seat(rank).freed) {
      spoil(comm->device, cudaErrorIllegalAddress, "a collective used memory that its peer had freed");
      return true;
    }
  return false;
}

template <class Come>
bool spin(ncclComm* comm, const Come& come) {
  for (Spin step; !come(); step.once()) {
    if (comm->stopped() || spoilt(comm->device)) return false;
    if (freeing_is("strict") && peers_freed(comm)) return false;
  }
  return !comm->stopped();
}

// With FAKE_NCCL_EXCLUSIVE=1 a device runs one kernel at a time: the worst that NCCL allows itself.
std::atomic<bool> taken[64];

class Turn {
 public:
  explicit Turn(ncclComm* comm) : device_(comm->device) {
    if (!setting("FAKE_NCCL_EXCLUSIVE", 0)) return;
    got_ = spin(comm, [this] { return !taken[device_].exchange(true); });
  }
  ~Turn() {
    if (got_) taken[device_] = false;
  }

 private:
  int device_;
  bool got_ = false;
};

void run(ncclComm* comm, const std::vector<Part>& parts) {
  switch (strike("kernel", comm->device, comm->rank)) {
    case Blow::error: comm->error = ncclRemoteError; break;
    case Blow::hang: hang();
    case Blow::none: break;
  }
  Turn turn(comm);
  if (comm->error != ncclSuccess) {
    spin(comm, [] { return false; });  // until it is aborted
    return;
  }
  if (comm->stopped() || peers_freed(comm)) return;
  for (const Part& part : parts)
    if (!part.post()) return;
  for (const Part& part : parts)
    if (!part.finish()) return;
}

ncclResult_t launch(ncclComm* comm, cudaStream_t stream, std::vector<Part> parts) {
  auto kernel = [comm, parts = std::move(parts), held = busy(comm)] { run(comm, parts); };
  return perform(comm, [comm, stream, kernel = std::move(kernel)]() -> ncclResult_t {
    if (auto result = connect(comm)) return result;
    if (auto result = suffer(comm, "launch")) return result;
    if (comm->aborted) return failed(comm, ncclInternalError, "aborted while it was launched");
    return enqueue(stream, kernel) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
  });
}

thread_local int depth = 0;
thread_local std::vector<Part> grouped;
thread_local std::vector<std::function<void()>> at_end;  // aborts in a group

ncclResult_t usable(ncclComm* comm) {
  if (!comm) return ncclInvalidArgument;
  if (comm->stopped()) return failed(comm, ncclInvalidUsage, "the communicator was aborted or revoked");
  if (comm->error != ncclSuccess) return static_cast<ncclResult_t>(comm->error.load());
  if (comm->state == ncclInProgress) return failed(comm, ncclInvalidUsage, "the last call is still in progress");
  return static_cast<ncclResult_t>(comm->state.load());
}

ncclResult_t submit(Part part) {
  if (depth == 0) return launch(part.comm, part.stream, {std::move(part)});
  grouped.push_back(std::move(part));
  return ncclSuccess;
}

// ---- collectives -----------------------------------------------------------------------------------------------------

struct Header {
  int kind, dtype, op, root;
  uint64_t count;
};

// Everybody sends `bytes` of `in` to everybody; `use` puts the answer together.
using Gathered = std::vector<std::vector<char>>;

ncclResult_t collective(ncclComm* comm, cudaStream_t stream, Header header, const void* in, size_t bytes,
                        void* out, size_t out_bytes, std::function<void(const Gathered&, char*)> use) {
  if (auto result = usable(comm)) return result;
  const uint64_t number = ++comm->collectives;
  count(Count::collectives);
  count(Count::collective_bytes, std::max(bytes, out_bytes));
  auto file = [](uint64_t which, int rank) { return "c" + std::to_string(which) + "." + std::to_string(rank); };
  auto post = [=] {
    if (!may_use(comm->device, in, bytes) || !may_use(comm->device, out, out_bytes)) return false;
    uint64_t through = UINT64_MAX;  // what all have taken is not needed any more
    for (int rank = 0; rank < comm->size; rank++)
      through = std::min<uint64_t>(through, comm->shared->seat(rank).taken);
    {
      std::lock_guard<std::mutex> lock(comm->counting);
      for (; comm->kept_from <= through; comm->kept_from++)
        comm->shared->remove(file(comm->kept_from, comm->rank));
    }
    std::vector<char> whole(sizeof header + bytes);
    memcpy(whole.data(), &header, sizeof header);
    if (bytes) memcpy(whole.data() + sizeof header, in, bytes);
    comm->shared->put(file(number, comm->rank), whole.data(), whole.size());
    std::lock_guard<std::mutex> lock(comm->counting);
    comm->posting.add(number, comm->shared->seat(comm->rank).posted);
    return true;
  };
  auto finish = [=] {
    Gathered gathered(static_cast<size_t>(comm->size));
    for (int rank = 0; rank < comm->size; rank++) {
      if (!spin(comm, [=] { return comm->shared->seat(rank).posted >= number; })) {
        if (may_use(comm->device, out, out_bytes)) memset(out, 0xAB, out_bytes / 2);  // what an aborted kernel leaves
        return false;
      }
      auto& data = gathered[static_cast<size_t>(rank)];
      if (!comm->shared->get(file(number, rank), data)) {
        if (!peers_freed(comm)) shout("rank %d: data of rank %d is missing", comm->rank, rank);
        return false;
      }
      if (memcmp(data.data(), &header, sizeof header)) {
        shout("rank %d and rank %d launched different collectives as number %lu: this hangs", comm->rank, rank, number);
        return spin(comm, [] { return false; });
      }
      data.erase(data.begin(), data.begin() + sizeof header);
    }
    if (!may_use(comm->device, out, out_bytes)) return false;
    use(gathered, static_cast<char*>(out));
    std::lock_guard<std::mutex> lock(comm->counting);
    comm->taking.add(number, comm->shared->seat(comm->rank).taken);
    return true;
  };
  return submit({comm, stream, post, finish});
}

enum Kind { kAllReduce, kReduce, kReduceScatter, kBroadcast, kAllGather, kAllToAll };

// Factors of sums that multiply each rank's elements first, by operator: the numbers after NCCL's own.
std::mutex premultiplying;
std::map<int, double> factors;

double factor_of(ncclRedOp_t op) {
  std::lock_guard<std::mutex> lock(premultiplying);
  auto found = factors.find(op);
  return found == factors.end() ? 1.0 : found->second;
}

bool reducible(ncclDataType_t dtype, ncclRedOp_t op) {
  double probe = 0;
  std::lock_guard<std::mutex> lock(premultiplying);
  return ((op >= ncclSum && op <= ncclAvg) || factors.count(op)) && typed(&probe, dtype, [](auto*) {});
}

// The reduction of all ranks' elements from `first` on.
void reduce(const Gathered& gathered, size_t first, size_t count, ncclDataType_t dtype, ncclRedOp_t op, double factor,
            char* out) {
  const size_t offset = first * width(dtype), bytes = count * width(dtype);
  std::vector<char> sum, next;
  for (size_t rank = 0; rank < gathered.size(); rank++) {
    const char* at = gathered[rank].data() + offset;
    next.assign(at, at + bytes);
    if (op > ncclAvg) multiply(next.data(), count, dtype, factor);
    if (rank == 0) sum = next;
    else reduce_into(sum.data(), next.data(), count, dtype, op);
  }
  if (op == ncclAvg) average(sum.data(), count, dtype, static_cast<int>(gathered.size()));
  std::copy(sum.begin(), sum.end(), out);
}

}  // namespace

NCCL_API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t dtype,
                                               ncclScalarResidence_t, ncclComm_t) {
  double factor = 0;
  if (!typed(scalar, dtype, [&](auto* value) { factor = static_cast<double>(*value); })) return ncclInvalidArgument;
  std::lock_guard<std::mutex> lock(premultiplying);
  int number = ncclNumOps;
  while (factors.count(number)) number++;
  factors[number] = factor;
  *op = static_cast<ncclRedOp_t>(number);
  return ncclSuccess;
}

NCCL_API ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t) {
  std::lock_guard<std::mutex> lock(premultiplying);
  return factors.erase(op) ? ncclSuccess : ncclInvalidArgument;
}

NCCL_API ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                                    ncclComm_t comm, cudaStream_t stream) {
  if (!reducible(dtype, op)) return ncclInvalidArgument;
  const double factor = factor_of(op);
  const size_t bytes = count * width(dtype);
  return collective(comm, stream, {kAllReduce, dtype, op, 0, count}, in, bytes, out, bytes,
                    [=](const Gathered& gathered, char* to) { reduce(gathered, 0, count, dtype, op, factor, to); });
}

NCCL_API ncclResult_t ncclReduce(const void* in, void* out, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                                 int root, ncclComm_t comm, cudaStream_t stream) {
  if (!reducible(dtype, op)) return ncclInvalidArgument;
  const double factor = factor_of(op);
  const size_t bytes = count * width(dtype);
  const bool mine = comm && comm->rank == root;
  return collective(comm, stream, {kReduce, dtype, op, root, count}, in, bytes, mine ? out : nullptr, mine ? bytes : 0,
                    [=](const Gathered& gathered, char* to) {
                      if (mine) reduce(gathered, 0, count, dtype, op, factor, to);
                    });
}

NCCL_API ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                                        ncclComm_t comm, cudaStream_t stream) {
  if (!reducible(dtype, op) || !comm) return ncclInvalidArgument;
  const double factor = factor_of(op);
  const size_t bytes = count * width(dtype), first = count * static_cast<size_t>(comm->rank);
  return collective(comm, stream, {kReduceScatter, dtype, op, 0, count}, in, bytes * static_cast<size_t>(comm->size),
                    out, bytes,
                    [=](const Gathered& gathered, char* to) { reduce(gathered, first, count, dtype, op, factor, to); });
}

NCCL_API ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t dtype, int root,
                                    ncclComm_t comm, cudaStream_t stream) {
  const size_t bytes = count * width(dtype);
  const bool mine = comm && comm->rank == root;
  return collective(comm, stream, {kBroadcast, dtype, 0, root, count}, in, mine ? bytes : 0, out, bytes,
                    [=](const Gathered& gathered, char* to) {
                      const auto& data = gathered[static_cast<size_t>(root)];
                      std::copy(data.begin(), data.end(), to);
                    });
}

NCCL_API ncclResult_t ncclBcast(void* both, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm,
                                cudaStream_t stream) {
  return ncclBroadcast(both, both, count, dtype, root, comm, stream);
}

NCCL_API ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t dtype, ncclComm_t comm,
                                    cudaStream_t stream) {
  if (!comm) return ncclInvalidArgument;
  const size_t bytes = count * width(dtype);
  return collective(comm, stream, {kAllGather, dtype, 0, 0, count}, in, bytes, out,
                    bytes * static_cast<size_t>(comm->size), [](const Gathered& gathered, char* to) {
                      for (const auto& data : gathered) to = std::copy(data.begin(), data.end(), to);
                    });
}

NCCL_API ncclResult_t ncclAlltoAll(const void* in, void* out, size_t count, ncclDataType_t dtype, ncclComm_t comm,
                                   cudaStream_t stream) {
  if (!comm) return ncclInvalidArgument;
  const size_t bytes = count * width(dtype), whole = bytes * static_cast<size_t>(comm->size);
  const long first = static_cast<long>(bytes) * comm->rank;
  return collective(comm, stream, {kAllToAll, dtype, 0, 0, count}, in, whole, out, whole,
                    [=](const Gathered& gathered, char* to) {
                      for (const auto& data : gathered)
                        to = std::copy_n(data.begin() + first, bytes, to);
                    });
}

// ---- one to one ------------------------------------------------------------------------------------------------------

namespace {

std::string letter(int from, int to, uint64_t number) {
  return "p" + std::to_string(from) + "." + std::to_string(to) + "." + std::to_string(number);
}

}  // namespace

// Done when the peer has taken it: a large one would not fit in between.
NCCL_API ncclResult_t ncclSend(const void* in, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                               cudaStream_t stream) {
  if (auto result = usable(comm)) return result;
  const std::string name = letter(comm->rank, peer, ++comm->sent[peer]);
  const size_t bytes = count * width(dtype);
  auto post = [=] {
    if (!may_use(comm->device, in, bytes)) return false;
    comm->shared->put(name, in, bytes);
    return true;
  };
  auto finish = [=] { return spin(comm, [=] { return !comm->shared->there(name); }); };
  return submit({comm, stream, post, finish});
}

NCCL_API ncclResult_t ncclRecv(void* out, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                               cudaStream_t stream) {
  if (auto result = usable(comm)) return result;
  const std::string name = letter(peer, comm->rank, ++comm->received[peer]);
  const size_t bytes = count * width(dtype);
  // Taken as soon as it is there, whatever the kernel waits for next: else two that send to each other would wait.
  auto post = [] { return true; };
  auto finish = [=] {
    std::vector<char> data;
    if (!spin(comm, [&] { return comm->shared->get(name, data); })) return false;
    if (data.size() != bytes) {
      shout("rank %d: rank %d sent %zu bytes, not %zu: this hangs", comm->rank, peer, data.size(), bytes);
      return spin(comm, [] { return false; });
    }
    if (!may_use(comm->device, out, bytes)) return false;
    memcpy(out, data.data(), bytes);
    comm->shared->remove(name);
    return true;
  };
  // In front of the sends of its group, which wait for the peer to take.
  if (depth == 0) return submit({comm, stream, post, finish});
  grouped.insert(grouped.begin(), {comm, stream, post, finish});
  return ncclSuccess;
}

// ---- groups ----------------------------------------------------------------------------------------------------------

NCCL_API ncclResult_t ncclGroupStart() {
  depth++;
  return ncclSuccess;
}

// One kernel for all of a communicator.
NCCL_API ncclResult_t ncclGroupEnd() {
  if (depth == 0) return ncclInvalidUsage;
  if (--depth > 0) return ncclSuccess;
  auto parts = std::move(grouped);
  auto ends = std::move(at_end);
  grouped.clear();
  at_end.clear();
  ncclResult_t all_of_them = ncclSuccess;
  while (!parts.empty()) {
    ncclComm* comm = parts.front().comm;
    cudaStream_t stream = parts.front().stream;
    auto others = std::stable_partition(parts.begin(), parts.end(), [=](const Part& part) {
      return part.comm == comm && part.stream == stream;
    });
    std::vector<Part> mine(parts.begin(), others);
    parts.erase(parts.begin(), others);
    const ncclResult_t result = launch(comm, stream, std::move(mine));
    if (result != ncclSuccess) all_of_them = result;
  }
  for (auto& end : ends) end();
  return all_of_them;
}

// ---- communicators ---------------------------------------------------------------------------------------------------

// Of this process, made and not freed: for tests.
NCCL_API long fake_nccl_communicators() { return communicators; }

NCCL_API ncclResult_t ncclGetVersion(int* version) {
  *version = static_cast<int>(::version());
  return ncclSuccess;
}

NCCL_API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  std::ifstream random("/dev/urandom", std::ios::binary);
  random.read(id->internal, 16);
  return ncclSuccess;
}

NCCL_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int size, ncclUniqueId id, int rank,
                                             ncclConfig_t* config) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) return ncclInvalidArgument;
  if (spoilt(current_device()) != cudaSuccess) return ncclUnhandledCudaError;
  std::string name;
  for (int i = 0; i < 16; i++) {
    char hex[3];
    snprintf(hex, sizeof hex, "%02x", static_cast<unsigned char>(id.internal[i]));
    name += hex;
  }
  auto* comm = new ncclComm;
  comm->shared = std::make_unique<Shared>(name);
  comm->rank = rank;
  comm->size = size;
  comm->device = current_device();
  comm->blocking = !config || config->blocking != 0;
  comm->connect_early = setting("NCCL_RUNTIME_CONNECT", 1) == 0;
  *out = comm;
  log("init of rank %d of %d on device %d, %s", rank, size, comm->device, comm->blocking ? "blocking" : "nonblocking");
  communicators++;
  return perform(comm, [comm, began = now()] {
    std::this_thread::sleep_for(std::chrono::milliseconds(setting("FAKE_NCCL_INIT_MS", 0)));
    return init(comm, began);
  });
}

NCCL_API ncclResult_t ncclCommInitRank(ncclComm_t* out, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(out, size, id, rank, nullptr);
}

NCCL_API ncclResult_t ncclCommInitRankScalable(ncclComm_t* out, int size, int rank, int, ncclUniqueId* ids,
                                               ncclConfig_t* config) {
  return ncclCommInitRankConfig(out, size, ids[0], rank, config);
}

NCCL_API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  if (!comm) return ncclInvalidArgument;
  *result = static_cast<ncclResult_t>(comm->error != ncclSuccess ? comm->error.load() : comm->state.load());
  return ncclSuccess;
}

NCCL_API ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
  if (!comm) return ncclInvalidArgument;
  *rank = comm->rank;
  return ncclSuccess;
}

NCCL_API ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
  if (!comm) return ncclInvalidArgument;
  *count = comm->size;
  return ncclSuccess;
}

NCCL_API ncclResult_t ncclCommCuDevice(ncclComm_t comm, int* device) {
  if (!comm) return ncclInvalidArgument;
  *device = comm->device;
  return ncclSuccess;
}

namespace {

void until_idle(ncclComm* comm) {
  for (Spin spin; comm->busy != 0; spin.once()) {
  }
}

// Frees what peers may still use: see peers_freed.
void reclaim(ncclComm* comm) {
  until_idle(comm);
  if (strike("abort", comm->device, comm->rank) == Blow::hang) hang();
  comm->shared->seat(comm->rank).freed = 1;
  for (; comm->kept_from <= comm->collectives; comm->kept_from++)
    comm->shared->remove("c" + std::to_string(comm->kept_from) + "." + std::to_string(comm->rank));
  bool last = true;
  for (int rank = 0; rank < comm->size; rank++) last &= comm->shared->seat(rank).freed != 0;
  if (last) comm->shared->remove_all();
  communicators--;
  log("rank %d of %d has freed its communicator", comm->rank, comm->size);
}

}  // namespace

NCCL_API ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  if (!comm || comm->revoked) return ncclInvalidUsage;
  return ncclSuccess;
}

// Of no communicator these two are a success, as in NCCL. Torch does it.
NCCL_API ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (comm) reclaim(comm);
  return ncclSuccess;
}

NCCL_API ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  log("abort of rank %d of %d", comm->rank, comm->size);
  comm->aborted = true;
  if (depth)
    at_end.push_back([comm] { reclaim(comm); });
  else
    reclaim(comm);
  return ncclSuccess;
}

// Ends what runs, and frees nothing: in progress until all is quiet.
NCCL_API ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
  if (!comm || flags != NCCL_REVOKE_DEFAULT) return ncclInvalidArgument;
  log("rank %d of %d is revoked", comm->rank, comm->size);
  comm->revoked = true;
  if (comm->blocking) {
    until_idle(comm);
    return ncclSuccess;
  }
  comm->state = ncclInProgress;
  std::thread([comm] {
    until_idle(comm);
    comm->state = ncclSuccess;
  }).detach();
  return ncclInProgress;
}

NCCL_API ncclResult_t ncclMemAlloc(void** at, size_t bytes) {
  return cudaMalloc(at, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

NCCL_API ncclResult_t ncclMemFree(void* at) {
  return cudaFree(at) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

NCCL_API const char* ncclGetLastError(ncclComm_t comm) { return comm ? comm->why.c_str() : ""; }

NCCL_API const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError: return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}
