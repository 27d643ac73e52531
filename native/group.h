// A group of ranks on one host that share memory: its collectives, in order, until it is aborted.
//
// Every rank maps the same control block and every rank's arena. Ranks are numbered within the group. All calls are
// thread-safe; collectives run in the order in which they were started, which must be the same on every rank. Every
// wait checks for aborts, the peers' processes and the deadline.
//
// Ownership: the caller keeps the mappings and the file descriptors until `elastic_detach` or `elastic_free`, and every
// buffer until its collective is complete, or the group has failed and `elastic_drain` has confirmed that nothing is
// written any more.
#pragma once

#include <cstddef>
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

typedef struct elastic_group elastic_group;

// Bytes of a control block for this number of ranks; the memory must be zero, without further initialisation.
size_t elastic_control_bytes(int32_t size);

// Bytes of staging in every rank's arena, for tensors outside of arenas.
size_t elastic_staging_bytes(void);

typedef struct {
  int32_t rank;
  int32_t size;               // 2 .. 64
  void* control;              // mapped shared; elastic_control_bytes(size)
  uint8_t* const* arenas;  // [size]: mappings of every rank's arena here; [rank] is our own
  const uint64_t* arena_bytes;
  const uint64_t* staging;    // [size]: offset of every rank's staging in its arena
  const int32_t* pidfds;      // [size]: -1 for none (our own)
  int32_t oversubscribed;  // more ranks than cores: waits yield the core early
  double timeout_s;  // for the other ranks, in any single wait
} elastic_options;

// Starts the group's thread. Returns null if the options are invalid or no thread can be created.
elastic_group* elastic_open(const elastic_options* options);

// Starts a collective; it runs after the previous ones. Returns its ticket (1, 2, ...), or 0 if the arguments are
// invalid. A failed group still returns tickets; waiting for them fails.
//
// allreduce: from `source` into `data`, which may be the same; otherwise `source` is only read. In place, a buffer in
// this rank's arena is reduced where it is; all others go through staging, from which the result is copied back, or is
// written directly to a `data` in the arena. The location may differ between ranks. A floating point result is
// multiplied by `factor` and then divided by `divisor`.
uint64_t elastic_allreduce(elastic_group* group, const void* source, void* data, uint64_t count, int32_t dtype,
                           int32_t op, double factor, double divisor);
// The two halves of an allreduce: rank r owns the r-th of `size` shares (of `count` elements, see elastic_share). After
// the first half each rank's own share has the reduction, and the other shares are unchanged; the second half copies
// every owner's share to all others. Only for buffers that are in the arena on every rank.
uint64_t elastic_reduce_shares(elastic_group* group, void* data, uint64_t count, int32_t dtype, int32_t op,
                               double factor, double divisor);
uint64_t elastic_spread_shares(elastic_group* group, void* data, uint64_t count, int32_t dtype);
void elastic_share(uint64_t count, int32_t dtype, int32_t size, int32_t rank, uint64_t* begin, uint64_t* end);

// A sum in a given order: `program` has `length` words in postfix notation. A word pushes the buffer of rank `word >>
// 16` at place `word & 0xffff`, or, if it is -1, replaces the top two values of the stack by their sum. A rank's
// buffers have `count` elements each and are `stride` bytes apart, starting at `data`; all in its arena. The result,
// one value, is rounded, multiplied by `factor` and divided by `divisor`, and replaces the buffer at place 0 of every
// rank, also of ranks that the program does not use; the others are unchanged. Floating point dtypes are rounded at
// each addition. The array is copied.
uint64_t elastic_reduce_tree(elastic_group* group, void* data, uint64_t count, uint64_t stride, int32_t dtype,
                             const int32_t* program, uint64_t length, double factor, double divisor);

uint64_t elastic_broadcast(elastic_group* group, void* data, uint64_t bytes, int32_t root);
// outputs[r] receives `bytes` bytes of rank r. The array is copied.
uint64_t elastic_allgather(elastic_group* group, void* const* outputs, const void* data, uint64_t bytes);
// sent[r] bytes are sent to rank r, from the front of `data` on; received[r] bytes come from it. The arrays are copied.
uint64_t elastic_alltoall(elastic_group* group, void* output, const void* data, const uint64_t* received,
                          const uint64_t* sent);
uint64_t elastic_barrier(elastic_group* group);

// 1 complete, 0 not yet, -1 the group failed before it was complete. Any thread.
int32_t elastic_done(elastic_group* group, uint64_t ticket);
// The same after waiting at most this long and making progress meanwhile.
int32_t elastic_wait(elastic_group* group, uint64_t ticket, double timeout_s);

// Messages between two ranks, in a group without collectives: both use the staging. Messages from one rank to another
// with the same tag are received in order; `source` -1 receives the first message of any rank. `state` is -1 and
// becomes the other rank once the message has been received: until then, or until the group is drained, the caller
// keeps it and the bytes. A message has as many bytes as the receive buffer and the same `type`, the caller's number
// for its elements: otherwise the group fails. Returns 0 if the arguments are invalid. Messages have no deadline except
// that of the waiting call.
int32_t elastic_send(elastic_group* group, const void* data, uint64_t bytes, uint64_t type, int32_t to, int64_t tag,
                     int32_t* state);
int32_t elastic_receive(elastic_group* group, void* data, uint64_t bytes, uint64_t type, int32_t source, int64_t tag,
                        int32_t* state);
int32_t elastic_wait_message(elastic_group* group, const int32_t* state, double timeout_s);  // as elastic_wait

// Ends every wait here and on the other ranks, for the first given reason. May be called from any thread, any number of
// times; never blocks.
void elastic_abort(elastic_group* group);

// Reason of the failure: reason << 8 | rank; 0 without a failure. One word, so that both are consistent. Any thread.
//   1 rank aborted it   2 rank's process has ended   3 rank was too late   4 rank called another collective
//   5 rank received a message of another size or type than expected: see elastic_mismatch
uint64_t elastic_status(elastic_group* group);

// For reason 5: the sender, then bytes and type of the message, then those of the receive. Any thread.
void elastic_mismatch(elastic_group* group, uint64_t* words);

// A bit for each rank that has not started the oldest collective that is incomplete here. Any thread.
uint64_t elastic_missing(elastic_group* group);

// After the group has failed: waits until no live rank writes into this rank's memory. Returns 1 if none does.
int32_t elastic_drain(elastic_group* group, double timeout_s);

// Aborts, and ends the group's thread: milliseconds. Other calls may follow; they see a failed group.
void elastic_close(elastic_group* group);

// After `elastic_close`: from now on no call accesses the control block, any arena or any descriptor, so that the
// caller may unmap and close them. Returns 1 on success; 0 if a call has not returned in that time, or there is no
// memory. Other calls may follow; `elastic_drain` then returns its last result.
int32_t elastic_detach(elastic_group* group, double timeout_s);

// After `elastic_close`, once no thread is in any call and none will follow. The control block and the arenas stay
// mapped: they belong to the caller. A forked child, which lacks the thread, must not call any of the three.
void elastic_free(elastic_group* group);

}  // extern "C"
#pragma GCC visibility pop
