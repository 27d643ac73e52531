#include "rounds.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace elastic {

namespace {

constexpr int kChunksAtOnce = 8;  // per `advance`, so that no thread waits long for its lock
constexpr int kCopiesAtOnce = 2;  // windows copied into staging per `advance`
constexpr int kTakesAtOnce = 8;

uint64_t mixed(uint64_t hash, uint64_t word) {  // FNV-1a over words: http://www.isthe.com/chongo/tech/comp/fnv
  return (hash ^ word) * 0x100000001b3u;
}

uint64_t signature_of(Kind kind, uint64_t bytes, uint64_t a, uint64_t b, Scale scale) {
  uint64_t factor, divisor;
  std::memcpy(&factor, &scale.factor, sizeof factor);
  std::memcpy(&divisor, &scale.divisor, sizeof divisor);
  uint64_t hash = mixed(0xcbf29ce484222325u, static_cast<uint64_t>(kind) + 1);
  for (const uint64_t word : {bytes, a, b, factor, divisor}) hash = mixed(mixed(hash, word & 0xffffffffu), word >> 32);
  return hash;
}

uint64_t windows_of(uint64_t bytes) { return std::max<uint64_t>(1, (bytes + kWindow - 1) / kWindow); }

// Consecutive additions are one row, from the top of the stack down: a + (b + (c + d)) is ((d + c) + b) + a, with the
// same bits. Not for halves, which are rounded at each addition, and before they are scaled.
std::vector<Row> rows_of(const int32_t* program, uint64_t length, DType dtype, Scale scale) {
  const bool half = dtype == DType::kFloat16 || dtype == DType::kBfloat16;
  std::vector<Row> rows;
  std::vector<int32_t> stack;
  for (uint64_t i = 0; i < length;) {
    if (program[i] >= 0) {
      stack.push_back(program[i++]);
      continue;
    }
    Row row{1, 0, {stack.back()}};
    do {
      stack.pop_back();
      row.from[row.n++] = stack.back();
      ++i;
    } while (!half && i < length && program[i] == -1);
    row.into = static_cast<int32_t>(stack.size()) - 1;
    stack.back() = -1 - row.into;
    rows.push_back(row);
  }
  if (rows.empty() || (half && (scale.factor != 1.0 || scale.divisor != 1.0))) rows.push_back(Row{1, 0, {stack.back()}});
  rows.back().into = -1;
  return rows;
}

void copy(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}

}  // namespace

void share_of(uint64_t count, size_t element, int size, int rank, uint64_t* begin, uint64_t* end) {
  const uint64_t step = std::max<uint64_t>(1, 64 / std::max<size_t>(1, element)), ranks = static_cast<uint64_t>(size);
  const uint64_t share = ((count + ranks - 1) / ranks + step - 1) / step * step;
  *begin = std::min(count, share * static_cast<uint64_t>(rank));
  *end = std::min(count, *begin + share);
}

Rounds::Rounds(const elastic_options& options)
    : rank_(options.rank),
      size_(options.size),
      shared_(static_cast<Control*>(options.control)),
      control_(shared_),
      arenas_(options.arenas, options.arenas + options.size),
      arena_bytes_(options.arena_bytes, options.arena_bytes + options.size),
      staging_(options.staging, options.staging + options.size),
      pidfds_(options.pidfds, options.pidfds + options.size),
      offering_(queue_.end()) {}

bool Rounds::owns(const void* data, uint64_t bytes) const {
  const auto at = reinterpret_cast<uintptr_t>(data), base = reinterpret_cast<uintptr_t>(arenas_[rank_]);
  return at >= base && at - base <= arena_bytes_[rank_] && bytes <= arena_bytes_[rank_] - (at - base);
}

// ---- requests -------------------------------------------------------------------------------------------------------

Collective Rounds::reduction(Kind kind, void* data, uint64_t count, int32_t dtype, int32_t op, Scale scale) const {
  Collective made;
  made.kind = kind;
  made.dtype = static_cast<DType>(dtype);
  made.bytes = count * element_bytes(made.dtype);
  made.windows = windows_of(made.bytes);
  made.source = made.data = static_cast<uint8_t*>(data);
  made.in_place = owns(data, made.bytes);
  made.reduce = kernels().reduce(made.dtype, static_cast<Op>(op));
  made.scale = scale;
  made.signature = signature_of(kind, made.bytes, static_cast<uint64_t>(dtype), static_cast<uint64_t>(op), scale);
  return made;
}

Collective Rounds::allreduce(const void* source, void* data, uint64_t count, int32_t dtype, int32_t op,
                             Scale scale) const {
  Collective made = reduction(Kind::kReduce, data, count, dtype, op, scale);
  made.source = static_cast<const uint8_t*>(source);
  made.lands = made.in_place;
  made.in_place = made.in_place && source == data;
  return made;
}

Collective Rounds::tree(void* data, uint64_t count, uint64_t stride, int32_t dtype, const int32_t* program,
                        uint64_t length, Scale scale, bool* sense) const {
  Collective made = reduction(Kind::kReduceTree, data, count, dtype, static_cast<int32_t>(Op::kSum), scale);
  made.stride = stride;
  made.reach.assign(static_cast<size_t>(size_), 0);
  *sense = made.reduce != nullptr && stride >= made.bytes && length > 0;
  int depth = 0;
  uint64_t hash = mixed(0xcbf29ce484222325u, stride);
  for (uint64_t i = 0; *sense && i < length; ++i) {
    const int32_t word = program[i];
    hash = mixed(hash, static_cast<uint32_t>(word));
    if (word == -1) {
      *sense = --depth >= 1;
    } else {
      *sense = word >= 0 && word >> 16 < size_ && ++depth <= kTreeDepth;
      if (*sense) {
        uint64_t& reach = made.reach[static_cast<size_t>(word >> 16)];
        reach = std::max(reach, static_cast<uint64_t>(word & 0xffff) * stride);
      }
    }
  }
  *sense = *sense && depth == 1 && owns(data, made.reach[static_cast<size_t>(rank_)] + made.bytes);
  made.sum_tree = kernels().sum_tree(made.dtype);
  if (*sense) made.rows = rows_of(program, length, made.dtype, scale);
  made.signature = signature_of(made.kind, made.bytes, static_cast<uint64_t>(dtype), hash, scale);
  return made;
}

Collective Rounds::broadcast(void* data, uint64_t bytes, int root) const {
  Collective made;
  made.kind = Kind::kBroadcast;
  made.bytes = bytes;
  made.windows = windows_of(bytes);
  made.data = static_cast<uint8_t*>(data);
  made.root = root;
  made.signature = signature_of(made.kind, bytes, static_cast<uint64_t>(root), 0, Scale{});
  return made;
}

Collective Rounds::allgather(void* const* outputs, const void* data, uint64_t bytes) const {
  Collective made;
  made.kind = Kind::kAllgather;
  made.bytes = bytes;
  made.windows = windows_of(bytes);
  made.source = static_cast<const uint8_t*>(data);
  for (int rank = 0; rank < size_; ++rank) made.outputs.push_back(static_cast<uint8_t*>(outputs[rank]));
  made.signature = signature_of(made.kind, bytes, 0, 0, Scale{});
  return made;
}

Collective Rounds::alltoall(void* output, const void* data, const uint64_t* received, const uint64_t* sent) const {
  Collective made;
  made.kind = Kind::kAlltoall;
  made.output = static_cast<uint8_t*>(output);
  made.source = static_cast<const uint8_t*>(data);
  made.received.assign(received, received + size_);
  made.sent.assign(sent, sent + size_);
  made.sized = false;  // the first window has the sizes of all pairs of ranks
  made.signature = signature_of(made.kind, 0, 0, 0, Scale{});
  return made;
}

Collective Rounds::barrier() const {
  Collective made;
  made.in_place = true;  // nothing is copied
  made.signature = signature_of(made.kind, 0, 0, 0, Scale{});
  return made;
}

void Rounds::append(std::list<Collective>& incoming) {
  if (incoming.empty()) return;
  const auto first = incoming.begin();
  queue_.splice(queue_.end(), incoming);
  if (offering_ == queue_.end()) offering_ = first;
}

// ---- progress --------------------------------------------------------------------------------------------------------

bool Rounds::advance() {
  if (stopped_) return false;
  bool moved = false;
  if (!failed()) moved |= offer(/*only_in_place=*/false);
  moved |= reduce_some();
  for (int i = 0; i < kTakesAtOnce && take_one(); ++i) moved = true;
  return moved;
}

void Rounds::offer_in_place() {
  if (!stopped_ && !failed()) offer(/*only_in_place=*/true);
}

bool Rounds::offer(bool only_in_place) {
  const uint64_t before = offered_;
  bool others_wait = false;  // for this rank only
  int copies = 0;
  while (offering_ != queue_.end() && copies < kCopiesAtOnce) {
    Collective& collective = *offering_;
    if (collective.offered == collective.windows) break;  // an alltoall without known sizes
    if (only_in_place && !collective.in_place) break;
    if (!may_offer(collective)) break;
    if (!collective.in_place) ++copies;
    others_wait |= collective.kind == Kind::kBroadcast;
    offer_window(collective);
    if (collective.offered == collective.windows && collective.sized) ++offering_;
  }
  if (offered_ == before) return false;
  // The last rank wakes the others. Two concurrent ranks must not both assume that the other one is last.
  seat(rank_).ready.store(offered_, std::memory_order_seq_cst);
  uint64_t least = UINT64_MAX;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_) least = std::min(least, seat(rank).ready.load(std::memory_order_seq_cst));
  }
  if (others_wait || least > before) bell().ring();
  return true;
}

bool Rounds::may_offer(const Collective& collective) {
  const uint64_t ahead = collective.in_place ? kRing : kSlots;
  if (offered_ < least_taken() + ahead) {
    seat(rank_).blocked.store(0, std::memory_order_relaxed);
    return true;
  }
  // Set before the second check: see `take_one`.
  seat(rank_).blocked.store(1, std::memory_order_seq_cst);
  return offered_ < least_taken() + ahead;
}

void Rounds::offer_window(Collective& collective) {
  const uint64_t number = offered_, window = collective.offered, entry = number % kRing;
  const uint64_t bytes = length(collective, window), at = window * kWindow;
  uint8_t* slot = staged(rank_, number);
  uint64_t offset = static_cast<uint64_t>(slot - arenas_[rank_]), result = offset;
  const uint64_t chunks = reduces(collective) ? (bytes + kChunk - 1) / kChunk : 0;
  switch (collective.kind) {
    case Kind::kReduce:
    case Kind::kReduceShares:
    case Kind::kReduceTree:
    case Kind::kSpreadShares:
      if (collective.in_place) {
        offset = result = static_cast<uint64_t>(collective.data - arenas_[rank_]) + at;
      } else {
        copy(slot, collective.source + at, bytes);
        if (collective.lands) result = static_cast<uint64_t>(collective.data - arenas_[rank_]) + at;
      }
      break;
    case Kind::kBroadcast:
      if (rank_ == collective.root) copy(slot, collective.data + at, bytes);
      break;
    case Kind::kAllgather:
      copy(slot, collective.source + at, bytes);
      break;
    case Kind::kAlltoall:
      if (window == 0) {
        std::memcpy(slot, collective.sent.data(), sizeof(uint64_t) * static_cast<size_t>(size_));
        break;
      }
      for (uint64_t to = 0, begin = 0; to < collective.sent.size(); begin += collective.sent[to++]) {
        const uint64_t done = (window - 1) * part();
        if (collective.sent[to] > done) {
          copy(slot + to * part(), collective.source + begin + done, std::min(part(), collective.sent[to] - done));
        }
      }
      break;
    case Kind::kBarrier:
      break;
  }
  offer_of(rank_, number) = Offer{collective.signature, offset, result};
  ring_[entry] = Round{&collective, window, expected_[entry], expected_[entry] + chunks, false};
  expected_[entry] += chunks;
  ++collective.offered;
  ++offered_;
}

bool Rounds::reduce_some() {
  bool moved = false;
  for (int chunks = 0; reduced_ < offered_ && chunks < kChunksAtOnce;) {
    const uint64_t number = reduced_;
    Round& round = ring_[number % kRing];
    if (!reduces(*round.collective)) {
      ++reduced_;
      moved = true;
      continue;
    }
    if (!all_ready(number) || !check(round, number)) break;
    Tally& tally = control()->tallies[number % kRing];
    if (failed()) {  // nothing new starts, but what was finished before is a result
      if (tally.finished.load(std::memory_order_seq_cst) < round.end) break;
      ++reduced_;
      moved = true;
      continue;
    }
    uint64_t claim = tally.claimed.load(std::memory_order_relaxed);
    while (claim < round.end && !tally.claimed.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel)) {
    }
    moved = true;
    if (claim >= round.end) {
      ++reduced_;
      continue;
    }
    ++chunks;
    if (!begin_writing()) break;
    run_chunk(round, number, claim - round.first);
    end_writing();
    if (tally.finished.fetch_add(1, std::memory_order_seq_cst) + 1 == round.end) bell().ring();
  }
  return moved;
}

bool Rounds::begin_writing() {
  seat(rank_).writing.store(1, std::memory_order_seq_cst);
  // An aborting rank reads `writing` after it has set the status: one of the two sees the other.
  if (control()->status.load(std::memory_order_seq_cst) == 0) return true;
  end_writing();
  return false;
}

void Rounds::run_chunk(const Round& round, uint64_t number, uint64_t chunk) {
  const Collective& collective = *round.collective;
  const uint64_t bytes = length(collective, round.window), element = element_bytes(collective.dtype);
  const uint64_t begin = chunk * kChunk, end = std::min(bytes, begin + kChunk);
  uint8_t* buffers[kMaxRanks];  // of the window
  for (int rank = 0; rank < size_; ++rank) buffers[rank] = arenas_[rank] + offer_of(rank, number).offset;
  void* to[kMaxRanks];
  const void* from[kMaxRanks];
  if (collective.kind == Kind::kReduce || collective.kind == Kind::kReduceTree) {
    for (int rank = 0; rank < size_; ++rank) {
      from[rank] = buffers[rank] + begin;
      to[rank] = arenas_[rank] + offer_of(rank, number).result + begin;
    }
    const size_t count = (end - begin) / element;
    if (collective.kind == Kind::kReduce) {
      collective.reduce(to, size_, from, size_, count, collective.scale);
    } else {
      collective.sum_tree(collective.rows.data(), collective.rows.size(), to, size_, from, collective.stride, count,
                          collective.scale);
    }
    return;
  }
  // Part of the chunk in each owner's share.
  const uint64_t window_at = round.window * kWindow;
  for (int owner = 0; owner < size_; ++owner) {
    uint64_t share_begin, share_end;
    share_of(collective.bytes / element, element, size_, owner, &share_begin, &share_end);
    const uint64_t low = std::max(window_at + begin, share_begin * element);
    const uint64_t high = std::min(window_at + end, share_end * element);
    if (low >= high) continue;
    const uint64_t at = low - window_at;
    if (collective.kind == Kind::kReduceShares) {
      for (int rank = 0; rank < size_; ++rank) from[rank] = buffers[rank] + at;
      to[0] = buffers[owner] + at;
      collective.reduce(to, 1, from, size_, (high - low) / element, collective.scale);
    } else {
      for (int rank = 0; rank < size_; ++rank) {
        if (rank != owner) copy(buffers[rank] + at, buffers[owner] + at, high - low);
      }
    }
  }
}

bool Rounds::take_one() {
  if (taken_ == reduced_) return false;
  const uint64_t number = taken_;
  Round& round = ring_[number % kRing];
  Collective& collective = *round.collective;
  if (reduces(collective)) {
    if (control()->tallies[number % kRing].finished.load(std::memory_order_seq_cst) < round.end) return false;
    if (!round.checked && !check(round, number)) return false;  // without elements
    if (!collective.in_place && !collective.lands) {
      copy(collective.data + round.window * kWindow, staged(rank_, number), length(collective, round.window));
    }
  } else if (!move(round, number)) {
    return false;
  }
  ++taken_;
  seat(rank_).taken.store(taken_, std::memory_order_seq_cst);
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_ && seat(rank).blocked.load(std::memory_order_seq_cst) != 0) {
      bell().ring();
      break;
    }
  }
  if (++collective.taken == collective.windows && collective.sized) {
    done_ = collective.ticket;
    queue_.pop_front();
  }
  return true;
}

// Copies the others' data from their staging. Returns false if it is not there yet, or the group has failed meanwhile.
bool Rounds::move(Round& round, uint64_t number) {
  Collective& collective = *round.collective;
  if (collective.kind == Kind::kBarrier) return all_ready(number) && check(round, number);
  if (failed()) return false;
  if (collective.kind == Kind::kBroadcast) {
    if (rank_ == collective.root) return true;
    if (seat(collective.root).ready.load(std::memory_order_seq_cst) <= number) return false;
    if (!agrees(collective, round.window, number, collective.root)) return false;
    copy(collective.data + round.window * kWindow, staged(collective.root, number), length(collective, round.window));
  } else {
    if (!all_ready(number) || !check(round, number)) return false;
    const uint64_t at = round.window * kWindow, done = round.window == 0 ? 0 : (round.window - 1) * part();
    uint64_t begin = 0;
    for (int rank = 0; rank < size_; ++rank) {
      if (collective.kind == Kind::kAllgather) {
        copy(collective.outputs[rank] + at, staged(rank, number), length(collective, round.window));
      } else if (collective.kind == Kind::kAlltoall && round.window > 0) {
        const uint64_t whole = collective.received[rank];
        if (whole > done) {
          copy(collective.output + begin + done, staged(rank, number) + static_cast<uint64_t>(rank_) * part(),
               std::min(part(), whole - done));
        }
        begin += whole;
      }
    }
    if (collective.kind == Kind::kAlltoall && round.window == 0) learn_sizes(collective, number);
  }
  // An aborting rank sets the status before it uses its staging for anything else. This operation writes, so that no
  // read of the copies can follow it.
  return control()->status.fetch_add(0, std::memory_order_seq_cst) == 0;
}

void Rounds::learn_sizes(Collective& collective, uint64_t number) {
  uint64_t most = 0;
  for (int rank = 0; rank < size_; ++rank) {
    uint64_t sent[kMaxRanks];
    std::memcpy(sent, staged(rank, number), sizeof(uint64_t) * static_cast<size_t>(size_));
    most = std::max(most, *std::max_element(sent, sent + size_));
    if (sent[rank_] != collective.received[rank]) fail(kOther, rank);
  }
  collective.windows = 1 + (most + part() - 1) / part();
  collective.sized = true;
  if (collective.offered == collective.windows && offering_ != queue_.end() && &*offering_ == &collective) ++offering_;
}

// ---- checks ----------------------------------------------------------------------------------------------------------

bool Rounds::check(Round& round, uint64_t number) {
  if (round.checked) return true;
  for (int rank = 0; rank < size_; ++rank) {
    if (!agrees(*round.collective, round.window, number, rank)) return false;
  }
  round.checked = true;
  return true;
}

bool Rounds::agrees(const Collective& collective, uint64_t window, uint64_t number, int rank) {
  const Offer& offer = offer_of(rank, number);
  uint64_t bytes = reduces(collective) ? length(collective, window) : 0;
  if (collective.kind == Kind::kReduceTree) bytes += collective.reach[static_cast<size_t>(rank)];
  const uint64_t last = std::max(offer.offset, offer.result);
  if (offer.signature == collective.signature && last <= arena_bytes_[rank] && bytes <= arena_bytes_[rank] - last) {
    return true;
  }
  fail(kOther, odd_one(number, rank));
  return false;
}

// If ranks have offered different collectives: a rank of the smallest group with the same one, unless all groups are
// equally large. Otherwise, the rank that was found to differ from this one.
int Rounds::odd_one(uint64_t number, int differs) const {
  int alike[kMaxRanks] = {}, least = size_, most = 0;
  for (int rank = 0; rank < size_; ++rank) {
    if (seat(rank).ready.load(std::memory_order_seq_cst) <= number) continue;
    for (int other = 0; other < size_; ++other) {
      if (seat(other).ready.load(std::memory_order_seq_cst) <= number) continue;
      alike[rank] += offer_of(rank, number).signature == offer_of(other, number).signature;
    }
    least = std::min(least, alike[rank]), most = std::max(most, alike[rank]);
  }
  if (least == most) return differs;
  return static_cast<int>(std::find(alike, alike + size_, least) - alike);
}

bool Rounds::all_ready(uint64_t number) const {
  for (int rank = 0; rank < size_; ++rank) {
    if (seat(rank).ready.load(std::memory_order_seq_cst) <= number) return false;
  }
  return true;
}

uint64_t Rounds::least_taken() const {
  uint64_t least = UINT64_MAX;
  for (int rank = 0; rank < size_; ++rank) least = std::min(least, seat(rank).taken.load(std::memory_order_seq_cst));
  return least;
}

uint64_t Rounds::length(const Collective& collective, uint64_t window) const {
  const uint64_t at = window * kWindow;
  return at >= collective.bytes ? 0 : std::min(kWindow, collective.bytes - at);
}

int Rounds::awaited() const {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_ && seat(rank).ready.load(std::memory_order_seq_cst) <= taken_) return rank;
  }
  // all have arrived; one stopped in the middle of a chunk
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_ && seat(rank).writing.load(std::memory_order_acquire) != 0) return rank;
  }
  const uint64_t least = least_taken();
  for (int rank = 0; rank < size_; ++rank) {
    if (seat(rank).taken.load(std::memory_order_seq_cst) == least) return rank;
  }
  return rank_;
}

uint64_t Rounds::missing() const {
  if (empty()) return 0;
  const uint64_t first = taken_ - queue_.front().taken, full = least_taken() + kSlots;
  uint64_t found = 0;
  for (int rank = 0; rank < size_; ++rank) {
    const uint64_t ready = seat(rank).ready.load(std::memory_order_seq_cst);
    // A rank that has something to offer, but no room, waits itself until another rank takes more.
    const bool waits = ready >= full && seat(rank).blocked.load(std::memory_order_seq_cst) != 0;
    if (rank != rank_ && ready <= first && !waits) found |= uint64_t{1} << rank;
  }
  return found;
}

uint64_t Rounds::gone() const {
  uint64_t found = 0;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_ && has_ended(pidfds_[rank])) found |= uint64_t{1} << rank;
  }
  return found;
}

bool Rounds::written_by_others() const {
  const Control* const seen = control();
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_ || seen->seats[rank].writing.load(std::memory_order_seq_cst) == 0) continue;
    if (seen != shared_ || !has_ended(pidfds_[rank])) return true;
  }
  return false;
}

bool Rounds::detach() {
  if (control() != shared_) return true;
  constexpr size_t kAlignment = alignof(Control);
  own_.reset(new (std::nothrow) uint8_t[control_bytes(size_) + kAlignment]());
  if (own_ == nullptr) return false;
  const auto start = reinterpret_cast<uintptr_t>(own_.get());
  auto* const copy = reinterpret_cast<Control*>((start + kAlignment - 1) / kAlignment * kAlignment);
  copy->status.store(status(), std::memory_order_relaxed);
  mismatch(copy->seats[status() & 0xff].mismatch);
  if (written_by_others()) copy->seats[(rank_ + 1) % size_].writing.store(1, std::memory_order_relaxed);
  control_.store(copy, std::memory_order_seq_cst);
  return true;
}

void Rounds::fail(uint64_t reason, int rank) {
  uint64_t none = 0;
  control()->status.compare_exchange_strong(none, reason << 8 | static_cast<uint64_t>(rank), std::memory_order_seq_cst);
  bell().ring();
}

void Rounds::fail_mismatch(const uint64_t (&words)[kMismatchWords]) {
  std::copy(std::begin(words), std::end(words), seat(rank_).mismatch);
  fail(kMismatch, rank_);
}

void Rounds::mismatch(uint64_t* words) const {
  const uint64_t found = status();
  const int rank = std::min(static_cast<int>(found & 0xff), size_ - 1);
  const auto& said = control()->seats[rank].mismatch;
  if (found >> 8 == kMismatch) std::copy(std::begin(said), std::end(said), words);
}

}  // namespace elastic
