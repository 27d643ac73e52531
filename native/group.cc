// The life of a group: its queue, its thread, progress and waiting. The data paths are in rounds.cc and lanes.cc.
#include "group.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <new>

#include "lanes.h"
#include "rounds.h"

using namespace elastic;

namespace {

constexpr int64_t kLookNs = 5'000'000;  // between checks of the peers' processes, while sleeping
constexpr int64_t kSpinNs = 100'000;  // spin time of a thread if every rank has a core
constexpr int kYields = 100;  // yields of a thread instead if ranks share cores
constexpr int64_t kYieldNs = 5'000'000;  // time limit of the yields

int64_t deadline_ns(double timeout_s) {
  return now_ns() + static_cast<int64_t>(std::max(0.0, std::min(timeout_s, 1e9)) * 1e9);
}

void nap() {
  timespec moment{0, 100'000};
  nanosleep(&moment, nullptr);
}

// Threads in calls that may access shared memory. A thread registers before it reads the address, and whether anything
// is shared any more: see `elastic_detach`.
struct Callers {
  std::atomic<int> inside{0};
  std::atomic<bool> detached{false};
};

class Caller {
 public:
  explicit Caller(Callers& callers) : callers_(callers) {
    callers_.inside.fetch_add(1, std::memory_order_seq_cst);
    counts_ = !callers_.detached.load(std::memory_order_seq_cst);
    if (!counts_) leave();
  }
  ~Caller() {
    if (counts_) leave();
  }
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

 private:
  void leave() { callers_.inside.fetch_sub(1, std::memory_order_seq_cst); }

  Callers& callers_;
  bool counts_;
};

}  // namespace

struct elastic_group {
  Rounds rounds;
  Lanes lanes;
  std::mutex driving;  // one thread at a time makes progress
  std::mutex queueing;  // protects `incoming` and `messages`; tickets are assigned under it
  std::list<Collective> incoming;
  std::list<Message> messages;
  std::atomic<uint64_t> tickets{0};
  std::atomic<uint64_t> done{0};  // all tickets up to this one are complete
  // futex on which the group's thread sleeps while there is nothing to do
  std::atomic<uint32_t> activity{0};
  std::atomic<bool> dozing{false};  // it is sleeping
  // threads in elastic_wait: they make progress, so the group's thread need not
  std::atomic<int> waiters{0};
  std::atomic<bool> closing{false};
  std::atomic<bool> carrying{false};  // messages are in progress
  Callers callers;
  std::atomic<int64_t> moved_at_ns{0};  // time of the last progress or idle state
  int64_t timeout_ns = 0;
  bool oversubscribed = false;
  pthread_t thread{};

  explicit elastic_group(const elastic_options& options) : rounds(options), lanes(options, kSlots * kWindow) {}

  uint64_t submit(Collective&& collective);
  int32_t post(Message&& message);
  bool nothing_to_do() const { return done.load() == tickets && !carrying.load(); }
  bool progress();
  bool carry();
  template <typename Verdict>
  int32_t wait(double timeout_s, Verdict verdict);
  bool turn();
  void doze();
  void nudge();
  void idle(int64_t idle_since_ns, int64_t until_ns, int* yields, bool background);
  void look();
  void work();
};

namespace {

void* run_thread(void* group) {
  static_cast<elastic_group*>(group)->work();
  return nullptr;
}

}  // namespace

uint64_t elastic_group::submit(Collective&& collective) {
  const Caller caller(callers);
  uint64_t ticket;
  {
    std::lock_guard<std::mutex> lock(queueing);
    // The timeout starts when an idle group gets work.
    if (done.load() == tickets) moved_at_ns.store(now_ns(), std::memory_order_relaxed);
    ticket = collective.ticket = ++tickets;
    incoming.push_back(std::move(collective));
  }
  // Data in the arena is offered immediately, so that the others need not wait for our thread. If another thread makes
  // progress now, it does this.
  if (driving.try_lock()) {
    {
      std::lock_guard<std::mutex> lock(queueing);
      rounds.append(incoming);
    }
    rounds.offer_in_place();
    driving.unlock();
  } else {
    rounds.bell().ring();  // that thread may have checked just before, and be about to sleep
  }
  nudge();
  return ticket;
}

int32_t elastic_group::post(Message&& message) {
  const Caller caller(callers);
  {
    std::lock_guard<std::mutex> lock(queueing);
    messages.push_back(std::move(message));
    carrying.store(true);
  }
  if (driving.try_lock()) {
    progress();
    driving.unlock();
  } else {
    rounds.bell().ring();
  }
  if (carrying.load()) nudge();
  return 1;
}

// Makes all progress that is possible without waiting. Returns whether there was any.
bool elastic_group::turn() {
  std::lock_guard<std::mutex> lock(driving);
  return progress();
}

bool elastic_group::progress() {
  {
    std::lock_guard<std::mutex> queue(queueing);
    rounds.append(incoming);
  }
  const bool carried = carry(), moved = rounds.advance();
  if (moved || rounds.empty()) moved_at_ns.store(now_ns(), std::memory_order_relaxed);
  if (rounds.done() != done.load(std::memory_order_relaxed)) done.store(rounds.done(), std::memory_order_release);
  return moved || carried;
}

// After the group has failed, messages that were read before are still complete, for sender and receiver.
bool elastic_group::carry() {
  if (!carrying.load() || rounds.stopped()) return false;
  {
    std::lock_guard<std::mutex> queue(queueing);
    lanes.append(messages);
  }
  bool moved = lanes.settle_read();
  if (rounds.begin_writing()) {
    bool wake = false;
    const bool sent = lanes.send_some(), received = lanes.receive_some(&wake);
    rounds.end_writing();
    if (sent || wake) rounds.bell().ring();
    moved |= sent || received;
  }
  const Lanes::Mismatch& found = lanes.mismatch();
  if (found.source >= 0 && !rounds.failed()) {
    rounds.fail_mismatch({static_cast<uint64_t>(found.source), found.sent_bytes, found.sent_type, found.room_bytes, found.room_type});
  }
  {
    std::lock_guard<std::mutex> queue(queueing);
    carrying.store(lanes.pending() || !messages.empty());
  }
  return moved;
}

void elastic_group::nudge() {
  activity.fetch_add(1, std::memory_order_seq_cst);
  if (dozing.load(std::memory_order_seq_cst)) futex_wake_all(&activity);
}

// For the group's thread, while there is nothing to do or another thread makes progress.
void elastic_group::doze() {
  const uint32_t seen = activity.load(std::memory_order_seq_cst);
  dozing.store(true, std::memory_order_seq_cst);
  bool nothing;
  {
    std::lock_guard<std::mutex> lock(queueing);
    nothing = nothing_to_do() || rounds.failed() || waiters.load() > 0;
  }
  if (nothing && !closing.load()) futex_wait(&activity, seen, rounds.failed() ? 100 * kLookNs : 20 * kLookNs);
  dozing.store(false, std::memory_order_seq_cst);
}

// Waits until another rank makes progress.
void elastic_group::idle(int64_t idle_since_ns, int64_t until_ns, int* yields, bool background) {
  const int64_t now = now_ns();
  if (!background && !oversubscribed && now - idle_since_ns < kSpinNs) {
    for (int i = 0; i < 20; ++i) pause_core();
    return;
  }
  if (!background && oversubscribed && *yields < kYields && now - idle_since_ns < kYieldNs) {
    ++*yields;
    sched_yield();
    return;
  }
  const int64_t most = std::min(kLookNs, until_ns - now);
  if (most > 0) rounds.bell().sleep(most, [this] { return !rounds.failed() && !turn(); });
  look();
}

// Checks the peers, as the waiting thread.
void elastic_group::look() {
  if (rounds.failed()) return;
  std::unique_lock<std::mutex> lock(driving, std::try_to_lock);
  if (!lock.owns_lock()) return;
  const uint64_t gone = rounds.gone();
  // Make progress after that check: a peer may have done its part and exited.
  if (progress()) return;
  const int lost = lanes.awaited(gone);
  if (lost >= 0) rounds.fail(kGone, lost);
  if (rounds.empty()) return;
  const int awaited = rounds.awaited();
  if (gone != 0) {
    rounds.fail(kGone, __builtin_ctzll(gone));
  } else if (now_ns() - moved_at_ns.load(std::memory_order_relaxed) > timeout_ns) {
    rounds.fail(kLate, awaited);
  }
}

template <typename Verdict>
int32_t elastic_group::wait(double timeout_s, Verdict verdict) {
  const Caller caller(callers);
  const int64_t until = deadline_ns(timeout_s);
  int32_t found = verdict();
  int yields = 0;
  int64_t idle_since = 0;
  waiters.fetch_add(1);
  while (found != 1) {
    const bool moved = turn();
    found = verdict();
    if (found != 0) break;
    const int64_t now = now_ns();
    if (now >= until) {
      look();
      break;
    }
    if (moved) {
      idle_since = 0;
    } else {
      if (idle_since == 0) idle_since = now, yields = 0;
      idle(idle_since, until, &yields, /*background=*/false);
    }
  }
  // The group's thread continues with the rest; an unnecessary wake-up would cost more than a small collective.
  if (waiters.fetch_sub(1) == 1 && !nothing_to_do()) nudge();
  return found;
}

void elastic_group::work() {
  int yields = 0;
  while (!closing.load()) {
    bool nothing;
    {
      std::lock_guard<std::mutex> lock(queueing);
      nothing = nothing_to_do();
    }
    if (nothing || rounds.failed() || waiters.load() > 0) {
      doze();
    } else if (!turn()) {
      const int64_t now = now_ns();
      idle(now, now + kLookNs, &yields, /*background=*/true);
    }
  }
}

namespace {

bool known(int32_t dtype, int32_t op) {
  return kernels().reduce(static_cast<DType>(dtype), static_cast<Op>(op)) != nullptr;
}

}  // namespace

extern "C" {

size_t elastic_control_bytes(int32_t size) { return size < 1 ? 0 : control_bytes(size); }

size_t elastic_staging_bytes(void) { return kSlots * kWindow; }

elastic_group* elastic_open(const elastic_options* options) {
  if (options == nullptr || options->size < 2 || options->size > kMaxRanks || options->rank < 0 ||
      options->rank >= options->size || options->control == nullptr || !(options->timeout_s > 0)) {
    return nullptr;
  }
  for (int32_t rank = 0; rank < options->size; ++rank) {
    const uint64_t bytes = options->arena_bytes[rank], staging = options->staging[rank];
    if (options->arenas[rank] == nullptr || staging > bytes || bytes - staging < kSlots * kWindow) return nullptr;
  }
  auto* group = new (std::nothrow) elastic_group(*options);
  if (group == nullptr) return nullptr;
  group->timeout_ns = static_cast<int64_t>(std::min(options->timeout_s, 1e9) * 1e9);
  group->oversubscribed = options->oversubscribed != 0;
  group->moved_at_ns = now_ns();
  // Signals belong to Python's threads: a handler of the script must not run on this one.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int error = pthread_create(&group->thread, nullptr, run_thread, group);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error != 0) {
    delete group;
    return nullptr;
  }
  return group;
}

uint64_t elastic_allreduce(elastic_group* group, const void* source, void* data, uint64_t count, int32_t dtype,
                           int32_t op, double factor, double divisor) {
  if (!known(dtype, op)) return 0;
  return group->submit(group->rounds.allreduce(source, data, count, dtype, op, Scale{factor, divisor}));
}

uint64_t elastic_reduce_shares(elastic_group* group, void* data, uint64_t count, int32_t dtype, int32_t op,
                               double factor, double divisor) {
  if (!known(dtype, op) || !group->rounds.owns(data, count * element_bytes(static_cast<DType>(dtype)))) return 0;
  return group->submit(group->rounds.reduction(Kind::kReduceShares, data, count, dtype, op, Scale{factor, divisor}));
}

uint64_t elastic_spread_shares(elastic_group* group, void* data, uint64_t count, int32_t dtype) {
  if (!known(dtype, static_cast<int32_t>(Op::kSum))) return 0;
  if (!group->rounds.owns(data, count * element_bytes(static_cast<DType>(dtype)))) return 0;
  return group->submit(
      group->rounds.reduction(Kind::kSpreadShares, data, count, dtype, static_cast<int32_t>(Op::kSum), Scale{}));
}

uint64_t elastic_reduce_tree(elastic_group* group, void* data, uint64_t count, uint64_t stride, int32_t dtype,
                             const int32_t* program, uint64_t length, double factor, double divisor) {
  bool sense = false;
  Collective made = group->rounds.tree(data, count, stride, dtype, program, length, Scale{factor, divisor}, &sense);
  return sense ? group->submit(std::move(made)) : 0;
}

void elastic_share(uint64_t count, int32_t dtype, int32_t size, int32_t rank, uint64_t* begin, uint64_t* end) {
  share_of(count, element_bytes(static_cast<DType>(dtype)), size, rank, begin, end);
}

uint64_t elastic_broadcast(elastic_group* group, void* data, uint64_t bytes, int32_t root) {
  if (root < 0 || root >= group->rounds.size()) return 0;
  return group->submit(group->rounds.broadcast(data, bytes, root));
}

uint64_t elastic_allgather(elastic_group* group, void* const* outputs, const void* data, uint64_t bytes) {
  return group->submit(group->rounds.allgather(outputs, data, bytes));
}

uint64_t elastic_alltoall(elastic_group* group, void* output, const void* data, const uint64_t* received,
                          const uint64_t* sent) {
  return group->submit(group->rounds.alltoall(output, data, received, sent));
}

uint64_t elastic_barrier(elastic_group* group) { return group->submit(group->rounds.barrier()); }

int32_t elastic_done(elastic_group* group, uint64_t ticket) {
  if (group->done.load(std::memory_order_acquire) >= ticket) return 1;
  const Caller caller(group->callers);
  if (!group->rounds.failed()) return 0;
  // Collectives that the others completed before are complete, even if they left immediately.
  while (group->turn()) {
  }
  return group->done.load(std::memory_order_acquire) >= ticket ? 1 : -1;
}

int32_t elastic_wait(elastic_group* group, uint64_t ticket, double timeout_s) {
  return group->wait(timeout_s, [=] { return elastic_done(group, ticket); });
}

int32_t elastic_send(elastic_group* group, const void* data, uint64_t bytes, uint64_t type, int32_t to, int64_t tag,
                     int32_t* state) {
  if (to < 0 || to >= group->rounds.size() || to == group->rounds.rank()) return 0;
  // The data is only read.
  return group->post(Message{static_cast<uint8_t*>(const_cast<void*>(data)), bytes, to, tag, type, state, 0, true});
}

int32_t elastic_receive(elastic_group* group, void* data, uint64_t bytes, uint64_t type, int32_t source, int64_t tag,
                        int32_t* state) {
  if (source < -1 || source >= group->rounds.size() || source == group->rounds.rank()) return 0;
  return group->post(Message{static_cast<uint8_t*>(data), bytes, source, tag, type, state, 0, false});
}

int32_t elastic_wait_message(elastic_group* group, const int32_t* state, double timeout_s) {
  const auto* word = reinterpret_cast<const std::atomic<int32_t>*>(state);
  return group->wait(timeout_s, [=] {
    if (word->load(std::memory_order_acquire) != kUnderWay) return 1;
    if (!group->rounds.failed()) return 0;
    group->turn();
    return word->load(std::memory_order_acquire) != kUnderWay ? 1 : -1;
  });
}

void elastic_abort(elastic_group* group) {
  const Caller caller(group->callers);
  group->rounds.fail(kAborted, group->rounds.rank());
}

uint64_t elastic_status(elastic_group* group) {
  const Caller caller(group->callers);
  return group->rounds.status();
}

void elastic_mismatch(elastic_group* group, uint64_t* words) {
  const Caller caller(group->callers);
  group->rounds.mismatch(words);
}

uint64_t elastic_missing(elastic_group* group) {
  const Caller caller(group->callers);
  std::lock_guard<std::mutex> lock(group->driving);
  return group->rounds.missing();
}

int32_t elastic_drain(elastic_group* group, double timeout_s) {
  const Caller caller(group->callers);
  const int64_t until = deadline_ns(timeout_s);
  bool stopped = false;  // our own threads
  while (true) {
    if (!stopped && group->driving.try_lock()) {
      group->rounds.stop();
      group->driving.unlock();
      stopped = true;
    }
    if (stopped && !group->rounds.written_by_others()) return 1;
    if (now_ns() >= until) return 0;
    nap();
  }
}

void elastic_close(elastic_group* group) {
  elastic_abort(group);
  if (group->closing.exchange(true)) return;
  group->activity.fetch_add(1);
  futex_wake_all(&group->activity);
  {
    const Caller caller(group->callers);
    group->rounds.bell().ring();
  }
  pthread_join(group->thread, nullptr);
}

int32_t elastic_detach(elastic_group* group, double timeout_s) {
  const int64_t until = deadline_ns(timeout_s);
  while (!group->driving.try_lock()) {
    if (now_ns() >= until) return 0;
    nap();
  }
  group->rounds.stop();
  const bool detached = group->rounds.detach();
  group->driving.unlock();
  if (!detached) return 0;
  group->callers.detached.store(true, std::memory_order_seq_cst);
  while (group->callers.inside.load(std::memory_order_seq_cst) != 0) {
    if (now_ns() >= until) return 0;
    nap();
  }
  return 1;
}

void elastic_free(elastic_group* group) { delete group; }

}  // extern "C"
