// One group of ranks of one host that share memory: its collectives, in order, until it is aborted.
//
// Every rank maps the same control block and every rank's arena. Ranks here count within the group. All calls are
// thread-safe; collectives run in the order in which they were started, which must be the same on every rank. Nobody ever
// blocks without looking at the aborts, at the peers' processes and at the deadline.
//
// Ownership: the caller keeps the mappings and the file descriptors until `elastic_detach` or `elastic_free`, and every
// buffer until its collective is done, or the group has failed and `elastic_drain` said that nothing is written any more.
#pragma once

#include <cstddef>
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

typedef struct elastic_group elastic_group;

// Bytes of a control block for so many ranks; the memory must be zeros at first, and is initialised by nobody.
size_t elastic_control_bytes(int32_t size);

// Bytes of staging that every rank gives in its arena, for tensors that lie outside of arenas.
size_t elastic_staging_bytes(void);

typedef struct {
  int32_t rank;
  int32_t size;               // 2 .. 64
  void* control;              // mapped shared; elastic_control_bytes(size)
  uint8_t* const* arenas;     // [size]: where every rank's arena is mapped here; [rank] is our own
  const uint64_t* arena_bytes;
  const uint64_t* staging;    // [size]: offset of every rank's staging in its arena
  const int32_t* pidfds;      // [size]: -1 for none (our own)
  int32_t oversubscribed;     // more ranks than cores: waits give the core away early
  double timeout_s;           // for the others to come, in any one wait
} elastic_options;

// Starts the group's thread. Returns null where the options make no sense or no thread can be had.
elastic_group* elastic_open(const elastic_options* options);

// Starts a collective; it runs after those before it. Returns its ticket (1, 2, ...), or 0 where the arguments make no
// sense. A group that has failed still gives tickets; waiting for them fails.
//
// allreduce: of `source` into `data`, which may be the same; else `source` is only read. In place, a buffer that lies in this
// rank's arena is reduced where it is; all else goes through staging, from where the result goes back, or straight to a `data`
// that lies in the arena. The ranks need not agree on where theirs lie. A result of floating
// point numbers is multiplied by `factor` and then divided by `divisor`.
uint64_t elastic_allreduce(elastic_group* group, const void* source, void* data, uint64_t count, int32_t dtype,
                           int32_t op, double factor, double divisor);
// The two halves of an allreduce: rank r owns the r-th of `size` shares (of `count` elements, see elastic_share).
// After the first each rank's own share holds the reduction, and the other shares are as they were; the second copies every
// owner's share to all others. Only for buffers that lie in the arena on every rank.
uint64_t elastic_reduce_shares(elastic_group* group, void* data, uint64_t count, int32_t dtype, int32_t op,
                               double factor, double divisor);
uint64_t elastic_spread_shares(elastic_group* group, void* data, uint64_t count, int32_t dtype);
void elastic_share(uint64_t count, int32_t dtype, int32_t size, int32_t rank, uint64_t* begin, uint64_t* end);

// A sum in an order of its own: `program` has `length` words in postfix, each of which pushes the buffer of rank `word >> 16`
// at place `word & 0xffff`, or, where it is -1, replaces the two on top of the stack by their sum. A rank's buffers have
// `count` elements each and lie `stride` bytes apart, from `data` on; all in its arena. The result, one value, is
// multiplied by `factor` and divided by `divisor` after it was rounded, and replaces the buffer at place 0 of every rank, also
// of one that the program does not name; the others are left as they are. Floating point dtypes are rounded at each addition. The array is copied.
uint64_t elastic_reduce_tree(elastic_group* group, void* data, uint64_t count, uint64_t stride, int32_t dtype,
                             const int32_t* program, uint64_t length, double factor, double divisor);

uint64_t elastic_broadcast(elastic_group* group, void* data, uint64_t bytes, int32_t root);
// outputs[r] receives `bytes` bytes of rank r. The array is copied.
uint64_t elastic_allgather(elastic_group* group, void* const* outputs, const void* data, uint64_t bytes);
// sent[r] bytes go to rank r, from the front of `data` on; received[r] come from it. The arrays are copied.
uint64_t elastic_alltoall(elastic_group* group, void* output, const void* data, const uint64_t* received,
                          const uint64_t* sent);
uint64_t elastic_barrier(elastic_group* group);

// 1 done, 0 not yet, -1 the group has failed before it was done. Any thread.
int32_t elastic_done(elastic_group* group, uint64_t ticket);
// The same after waiting at most so long, and doing the work meanwhile.
int32_t elastic_wait(elastic_group* group, uint64_t ticket, double timeout_s);

// Messages from one rank to another, in a group that has nothing else: both use the staging. What one rank sends to another
// under one tag is received in that order; `source` -1 takes what comes first of any rank. `state` is -1 and becomes the other
// rank once the message has been received: until then, or until the group is drained, the caller keeps it and the bytes. A
// message has as many bytes as the room for it, and the same `type`, which is the caller's name for its elements: else the
// group fails. Returns 0 where the arguments make no sense. They have no deadline but that of whoever waits.
int32_t elastic_send(elastic_group* group, const void* data, uint64_t bytes, uint64_t type, int32_t to, int64_t tag,
                     int32_t* state);
int32_t elastic_receive(elastic_group* group, void* data, uint64_t bytes, uint64_t type, int32_t source, int64_t tag,
                        int32_t* state);
int32_t elastic_wait_message(elastic_group* group, const int32_t* state, double timeout_s);  // as elastic_wait

// Ends every wait here and on the other ranks; any thread, any number of times, never blocks. The first reason counts.
void elastic_abort(elastic_group* group);

// Why the group failed: reason << 8 | rank; 0 while it has not. One word, so that both belong together. Any thread.
//   1 rank aborted it   2 rank's process is gone   3 rank did not come in time   4 rank called another collective
//   5 rank was sent a message of other bytes or another type than its receive: see elastic_mismatch
uint64_t elastic_status(elastic_group* group);

// Where the reason is 5: the sender, then bytes and type that were sent, then those of the receive. Any thread.
void elastic_mismatch(elastic_group* group, uint64_t* words);

// A bit for each rank that has not come to the oldest collective that is not over here. Any thread.
uint64_t elastic_missing(elastic_group* group);

// After the group has failed: waits until no live rank writes into this rank's memory. 1 if that is so.
int32_t elastic_drain(elastic_group* group, double timeout_s);

// Aborts, and ends the group's thread: milliseconds. Other calls may follow, and find that the group has failed.
void elastic_close(elastic_group* group);

// After `elastic_close`: no call touches the control block, any arena or any descriptor from here on, so that the caller may
// unmap and close them. 1 if that is so; 0 if a call that was under way has not returned in that time, or there is no
// memory. Other calls may follow; `elastic_drain` then says what it would have said last.
int32_t elastic_detach(elastic_group* group, double timeout_s);

// After `elastic_close`, once no thread is in any call and none will follow. The control block and the arenas stay mapped:
// they are the caller's. A forked child, where the thread is not, calls none of the three.
void elastic_free(elastic_group* group);

}  // extern "C"
#pragma GCC visibility pop
