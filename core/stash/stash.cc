// SPDX-License-Identifier: Apache-2.0
// core/stash/stash.cc: one order decides everything: the lowest ticket is needed last, so it is
// written first and loses its memory first; the highest that is away is brought next.
#include "core/stash/stash.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "base/checksum.h"
#include "base/error.h"

namespace ziggurat {
namespace {

constexpr std::size_t kWritesAtOnce = 4;
constexpr std::size_t kReadsAtOnce = 4;

PinnedPoolOptions pool_options(std::uint64_t memory_bytes) {
  PinnedPoolOptions options;
  options.budget_bytes = memory_bytes;
  options.alignment_bytes = StashFile::kAlignmentBytes;
  return options;
}

std::uint64_t rounded(std::uint64_t size_bytes) {
  return round_up(size_bytes, StashFile::kAlignmentBytes);
}

/// Adds the seconds of a scope in which a caller waits.
class Waited {
 public:
  Waited(Reactor& reactor, double& sum)
      : clock_(reactor.clock()), sum_(sum), begin_(clock_.now()) {}
  ~Waited() { sum_ += std::chrono::duration<double>(clock_.now() - begin_).count(); }
  Waited(const Waited&) = delete;
  Waited& operator=(const Waited&) = delete;

 private:
  Clock& clock_;
  double& sum_;
  Nanoseconds begin_;
};

}  // namespace

Stash::Stash(Reactor& reactor, Workers& workers, std::uint64_t memory_bytes,
             std::vector<StripePlace> places)
    : reactor_(reactor),
      workers_(workers),
      memory_bytes_(memory_bytes / StashFile::kAlignmentBytes * StashFile::kAlignmentBytes),
      file_(reactor, std::move(places)),
      work_(reactor),
      changed_(reactor) {
  if (memory_bytes_ == 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("a stash of {} has no memory: give at least what its largest item takes",
                    format_bytes(memory_bytes)));
  }
  pool_ = PinnedPool::create(reactor, pool_options(memory_bytes_));
}

Stash::~Stash() { ZIGGURAT_CHECK(work_.count() == 0, "{} transfers are under way", work_.count()); }

Stash::ItemPtr Stash::find(Ticket ticket) const {
  const auto found = items_.find(ticket);
  if (found != items_.end() && found->second->is_filled && !found->second->is_dropped)
    return found->second;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("the stash has no item {}: it was dropped, or never put", ticket));
}

/// Notes in which set an item is that nobody uses.
void Stash::index(const Item& item) {
  if (!item.memory || item.pins > 0 || item.is_writing || item.is_reading || item.is_dropped ||
      !item.is_filled)
    return;
  if (item.is_written) {
    clean_.insert(item.number);
  } else if (dirty_.insert(item.number).second) {
    dirty_bytes_ += item.memory.bytes().size();
  }
}

void Stash::unindex(const Item& item) {
  clean_.erase(item.number);
  if (dirty_.erase(item.number) > 0) dirty_bytes_ -= item.memory.bytes().size();
}

/// Forgets an item that was dropped once nobody uses it, and else notes in which set it is.
void Stash::rest(Item& item) {
  const bool used = item.pins > 0 || item.is_writing || item.is_reading;
  if (item.is_dropped && !used) {
    forget(item);
  } else {
    index(item);
  }
}

bool Stash::evict_one() {
  if (clean_.empty()) return false;
  Item& item = *items_.at(*clean_.begin());
  unindex(item);
  if (std::exchange(item.is_ahead, false)) ahead_bytes_ -= item.memory.bytes().size();
  give_memory_back(item);
  away_.insert(item.number);
  return true;
}

void Stash::give_memory_back(Item& item) {
  item.memory.reset();
  item.beyond.reset();
}

/// Takes memory that is free, or that items which are written give up.
Lease Stash::free_room(std::uint64_t size_bytes, const char* holder) {
  const LeaseRequest request{
      .purpose = Purpose::kActivations, .size_bytes = rounded(size_bytes), .holder = holder};
  while (true) {
    Lease lease = pool_->try_acquire(request);
    if (lease || !evict_one()) return lease;
  }
}

/// Returns whether nothing that is under way will free memory, so that a wait might never end.
bool Stash::only_the_trainer_frees_memory() const {
  return lent_bytes_ > 0 && std::ranges::none_of(items_, [](const auto& each) {
           const Item& item = *each.second;
           const bool used =
               !item.is_filled || item.is_writing || item.is_reading || item.pins > item.lends;
           return item.memory && used;
         });
}

/// Returns no memory if what is lent would have to come back for it.
Task<Lease> Stash::room(std::uint64_t size_bytes, const char* holder) {
  if (rounded(size_bytes) > memory_bytes_) {
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("an item of {} does not fit the stash's memory of {}: give it at least "
                            "{}",
                            format_bytes(size_bytes), format_bytes(memory_bytes_),
                            format_bytes(rounded(size_bytes))));
  }
  Lease lease;
  std::exception_ptr failure;
  failure_ = nullptr;  // the drives are asked again: they may have room by now
  ++waiting_;
  while (!(lease = free_room(size_bytes, holder))) {
    if ((failure = std::exchange(failure_, nullptr))) break;
    write_ahead();
    if (failure_) continue;
    if (only_the_trainer_frees_memory()) break;
    // This ends: what is being filled or read is released soon, and then written if it has to be;
    // what is written gives its memory up. A bring() that waits here has none.
    changed_.reset();
    co_await changed_.wait();
  }
  --waiting_;
  if (failure) std::rethrow_exception(failure);
  co_return lease;
}

Task<Stash::Room> Stash::put(std::uint64_t size_bytes) {
  brought_ = 0;  // a forward: nothing more is brought ahead
  const Waited waited(reactor_, figures_.waited_to_put_s);
  Lease memory = co_await room(size_bytes, "put");
  if (!memory) co_return Room{};
  const auto item = std::make_shared<Item>(reactor_, ++last_, size_bytes);
  item->memory = std::move(memory);
  item->arrived.set();
  items_.emplace(item->number, item);
  co_return Room{.ticket = item->number, .bytes = item->memory.bytes().first(size_bytes)};
}

void Stash::filled(Ticket ticket) {
  const auto found = items_.find(ticket);
  if (found == items_.end() || found->second->is_filled) return;
  Item& item = *found->second;
  // Whole blocks are written and hashed.
  std::ranges::fill(item.memory.bytes().subspan(item.size_bytes), std::byte{});
  item.is_filled = true;
  figures_.put_bytes += item.size_bytes;
  index(item);
  changed_.set();
  write_ahead();
}

/// Starts to write what will be needed last, if too little memory is left for what comes.
void Stash::write_ahead() {
  const std::uint64_t kept = waiting_ > 0 ? 0 : memory_bytes_ / 4 * 3;
  while (!settling_ && !failure_ && dirty_bytes_ > kept && writing_ < kWritesAtOnce) {
    const ItemPtr item = items_.at(*dirty_.begin());
    unindex(*item);
    item->is_writing = true;
    ++writing_;
    work_.spawn(write(item));
  }
}

Task<> Stash::write(ItemPtr item) {
  try {
    const std::span<const std::byte> bytes = item->memory.bytes();
    const std::function<void()> job = [&] { item->hash = hash64(bytes, item->number); };
    co_await workers_.run(reactor_, {"hash item", bytes.size()}, job);
    if (!item->is_dropped) {
      item->range = file_.take(bytes.size());
      co_await file_.write(*item->range, bytes, IoPriority::kDemand);
      item->is_written = true;
      figures_.written_bytes += bytes.size();
    }
  } catch (...) {
    failure_ = std::current_exception();
    if (item->range) file_.give_back(*std::exchange(item->range, std::nullopt));
  }
  item->is_writing = false;
  --writing_;
  rest(*item);
  changed_.set();
  write_ahead();
  bring_ahead();
}

Task<std::span<const std::byte>> Stash::bring(Ticket ticket) {
  const ItemPtr item = find(ticket);
  const Waited waited(reactor_, figures_.waited_to_bring_s);
  ++item->pins;
  unindex(*item);
  item->failed_ahead = false;
  brought_ = ticket;
  std::exception_ptr failure;
  try {
    while (item->is_reading) co_await item->arrived.wait();
    if (!item->memory) {
      item->is_reading = true;
      item->arrived.reset();
      away_.erase(ticket);
      co_await read(item);
    }
  } catch (...) {
    failure = std::current_exception();
  }
  if (failure) {
    release(ticket);
    std::rethrow_exception(failure);
  }
  if (std::exchange(item->is_ahead, false)) ahead_bytes_ -= item->memory.bytes().size();
  bring_ahead();
  co_return item->memory.bytes().first(item->size_bytes);
}

/// Reads an item, into memory that it takes if it has none. After an error it is away as before.
Task<> Stash::read(ItemPtr item) {
  std::exception_ptr failure;
  try {
    if (!item->memory) item->memory = co_await room(item->size_bytes, "brought");
    if (!item->memory) {
      item->beyond = PinnedPool::create(reactor_, pool_options(rounded(item->size_bytes)));
      item->memory = item->beyond->try_acquire({.purpose = Purpose::kActivations,
                                                .size_bytes = rounded(item->size_bytes),
                                                .holder = "brought beyond the budget"});
    }
    Task<> reading = read_checked(*item);
    co_await std::move(reading);
  } catch (...) {
    failure = std::current_exception();
    give_memory_back(*item);
    if (!item->is_dropped) away_.insert(item->number);
  }
  item->is_reading = false;
  item->arrived.set();
  changed_.set();
  if (failure) std::rethrow_exception(failure);
}

Task<> Stash::read_checked(Item& item) {
  const std::span<std::byte> bytes = item.memory.bytes();
  co_await file_.read(*item.range, bytes, IoPriority::kDemand);
  std::uint64_t hash = item.hash;  // what the job finds, unless the item is damaged
  const std::function<void()> job = [&] { hash = hash64(bytes, item.number); };
  co_await workers_.run(reactor_, {"verify item", bytes.size()}, job);
  if (hash != item.hash) throw file_.corrupt(*item.range);
  figures_.read_bytes += bytes.size();
}

/// Brings what was put before the item that was brought last, while a quarter of the memory stays
/// free for what is put meanwhile. One item comes in any case.
void Stash::bring_ahead() {
  if (brought_ == 0 || settling_ || waiting_ > 0) return;
  auto next = away_.lower_bound(brought_);
  while (next != away_.begin() && reading_ahead_ < kReadsAtOnce) {
    const ItemPtr item = items_.at(*--next);
    if (item->failed_ahead) continue;
    const std::uint64_t size_bytes = rounded(item->size_bytes);
    if (ahead_bytes_ > 0 && pool_->free_bytes() < size_bytes + memory_bytes_ / 4) return;
    item->memory = pool_->try_acquire(
        {.purpose = Purpose::kActivations, .size_bytes = size_bytes, .holder = "brought ahead"});
    if (!item->memory) return;
    next = away_.erase(next);
    item->is_ahead = true;
    item->is_reading = true;
    item->arrived.reset();
    ahead_bytes_ += size_bytes;
    ++reading_ahead_;
    work_.spawn(read_ahead(item));
  }
}

Task<> Stash::read_ahead(ItemPtr item) {
  const std::uint64_t size_bytes = rounded(item->size_bytes);
  try {
    co_await read(item);
    figures_.brought_ahead_bytes += size_bytes;
  } catch (...) {
    // Who needs the item reads it again and is told.
    item->failed_ahead = true;
    if (std::exchange(item->is_ahead, false)) ahead_bytes_ -= size_bytes;
  }
  --reading_ahead_;
  rest(*item);
  bring_ahead();
}

void Stash::release(Ticket ticket) {
  const auto found = items_.find(ticket);
  if (found == items_.end() || found->second->pins == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("item {} of the stash is not in use: it was released before, or never "
                            "brought",
                            ticket));
  }
  const ItemPtr item = found->second;
  if (--item->pins > 0) {
    if (item->pins == item->lends) changed_.set();  // who waits for room may wait for nothing now
    return;
  }
  rest(*item);
  changed_.set();
  write_ahead();
  bring_ahead();
}

Task<Stash::Loan> Stash::lend(Ticket ticket) {
  const ItemPtr item = find(ticket);
  const std::uint64_t size_bytes = rounded(item->size_bytes);
  // What is being written must keep the bytes that were hashed.
  if (item->is_writing || lent_bytes_ + size_bytes > memory_bytes_ / 2) co_return Loan{};
  lent_bytes_ += size_bytes;
  std::exception_ptr failure;
  try {
    co_await bring(ticket);
  } catch (...) {
    failure = std::current_exception();
    lent_bytes_ -= size_bytes;
  }
  if (failure) std::rethrow_exception(failure);
  ++item->lends;
  loans_.emplace(++last_loan_, ticket);
  figures_.lent_bytes += item->size_bytes;
  co_return Loan{.number = last_loan_, .bytes = item->memory.bytes().first(item->size_bytes)};
}

void Stash::give_back(std::uint64_t loan) {
  const auto found = loans_.find(loan);
  if (found == loans_.end()) return;
  const Ticket ticket = found->second;
  loans_.erase(found);
  Item& item = *items_.at(ticket);  // a loan pins it
  --item.lends;
  lent_bytes_ -= rounded(item.size_bytes);
  release(ticket);
}

void Stash::drop(Ticket ticket) noexcept {
  const auto found = items_.find(ticket);
  if (found == items_.end()) return;
  const ItemPtr item = found->second;
  unindex(*item);
  item->is_dropped = true;
  rest(*item);
  changed_.set();
  bring_ahead();
}

/// Gives back what a dropped item has.
void Stash::forget(Item& item) {
  if (std::exchange(item.is_ahead, false)) ahead_bytes_ -= rounded(item.size_bytes);
  give_memory_back(item);
  away_.erase(item.number);
  if (item.range) file_.give_back(*std::exchange(item.range, std::nullopt));
  items_.erase(item.number);  // the last use of `item`
}

Task<> Stash::settle() {
  settling_ = true;
  co_await work_.wait_idle();
}

StashFigures Stash::figures() const {
  StashFigures its = figures_;
  its.memory_peak_bytes = pool_->account().peak_bytes();
  return its;
}

}  // namespace ziggurat
