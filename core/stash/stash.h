// SPDX-License-Identifier: Apache-2.0
// core/stash/stash.h: keeps what a trainer needs again later in the step, such as activations, in
// the order of a stack: what was put last is needed first.
//
// Memory has a hard budget. When three quarters of it are filled, what was put first is written to
// NVMe while the trainer goes on; put() waits only if the rest is full too. Memory of what is
// written is given to others only when they need it, what was put first before the rest. When
// something is brought, what was put before it is brought ahead, as there is room.
//
// Half of the memory may be lent to the trainer, which gives it back when it pleases. Nobody waits
// for that: put() says that there is no room, and an item that must come takes memory beyond the
// budget meanwhile, which is no more than a copy of what is lent would have taken.
//
// An item that failed to be written stays in memory and whole; the error goes to the next call that
// needs the room. Reactor's thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "base/runtime/async.h"
#include "base/runtime/worker_pool.h"
#include "core/stash/stash_file.h"
#include "tiers/pool/pinned_pool.h"

namespace ziggurat {

struct StashFigures {
  std::uint64_t put_bytes = 0;
  std::uint64_t written_bytes = 0;
  std::uint64_t read_bytes = 0;
  std::uint64_t brought_ahead_bytes = 0;  ///< of those that were read
  std::uint64_t lent_bytes = 0;
  std::uint64_t memory_peak_bytes = 0;
  double waited_to_put_s = 0;
  double waited_to_bring_s = 0;
};

class Stash {
 public:
  using Ticket = std::uint64_t;  ///< numbers items in the order of puts, from 1 on

  /// Takes `memory_bytes` (rounded down to 4 KiB) now, and makes files in `places`. Errors:
  /// kInvalidArgument if that is nothing; those of the pool and of the files.
  Stash(Reactor& reactor, Workers& workers, std::uint64_t memory_bytes,
        std::vector<StripePlace> places);
  ~Stash();  ///< nothing may be under way: see settle()

  struct Room {
    Ticket ticket = 0;
    std::span<std::byte> bytes;
  };
  /// Waits for memory for an item, which the caller fills at once and then confirms with filled().
  /// Returns none, and ticket 0, if what is lent would have to come back for it. Errors:
  /// kResourceExhausted if it is larger than all memory; why others could not be written.
  Task<Room> put(std::uint64_t size_bytes);
  void filled(Ticket ticket);  ///< ignores an item that is not there

  /// Returns an item's bytes, which stay where they are until release(). Pins count. The caller
  /// copies them at once, since others wait for the memory. Errors: kInvalidArgument for an item
  /// that is not there or not filled; those of put() for its memory; the drive's, and kDataLoss if
  /// its bytes are others.
  Task<std::span<const std::byte>> bring(Ticket ticket);
  /// Errors: kInvalidArgument for an item that is not pinned.
  void release(Ticket ticket);
  struct Loan {
    std::uint64_t number = 0;  ///< of no other loan
    std::span<std::byte> bytes;
  };
  /// Brings an item and lends its memory: the caller has it, and may write it, until give_back().
  /// Returns none, and number 0, if it may not be lent now: bring() it. Errors: those of bring().
  Task<Loan> lend(Ticket ticket);
  void give_back(std::uint64_t loan);  ///< ignores one that has come back
  /// Forgets an item: its memory goes at once, or at its last release(). An unknown one is ignored.
  void drop(Ticket ticket) noexcept;

  /// Waits until nothing is under way, and starts nothing more.
  Task<> settle();
  StashFigures figures() const;

 private:
  struct Item {
    Item(Reactor& reactor, Ticket its_number, std::uint64_t its_bytes)
        : number(its_number), size_bytes(its_bytes), arrived(reactor) {}
    Ticket number;
    std::uint64_t size_bytes;                 // as given; memory and file have it rounded up
    std::unique_ptr<PinnedPool> beyond = {};  // has the memory if what is lent left none
    Lease memory = {};
    std::optional<StashFile::Range> range = {};  // set once it is written there, or is being
    std::uint64_t hash = 0;
    std::uint64_t pins = 0;
    std::uint64_t lends = 0;  // of the pins
    bool is_filled = false, is_written = false, is_writing = false, is_reading = false;
    bool is_dropped = false, is_ahead = false, failed_ahead = false;
    Signal arrived;  // set when no read is under way
  };
  using ItemPtr = std::shared_ptr<Item>;

  ItemPtr find(Ticket ticket) const;
  Task<Lease> room(std::uint64_t size_bytes, const char* holder);
  Lease free_room(std::uint64_t size_bytes, const char* holder);
  bool only_the_trainer_frees_memory() const;
  static void give_memory_back(Item& item);
  bool evict_one();
  void index(const Item& item);
  void unindex(const Item& item);
  void rest(Item& item);
  void write_ahead();
  Task<> write(ItemPtr item);
  Task<> read(ItemPtr item);
  Task<> read_checked(Item& item);
  void bring_ahead();
  Task<> read_ahead(ItemPtr item);
  void forget(Item& item);

  Reactor& reactor_;
  Workers& workers_;
  std::uint64_t memory_bytes_;
  std::unique_ptr<PinnedPool> pool_;
  StashFile file_;
  WorkGroup work_;
  Signal changed_;  // set when memory or an error came
  std::map<Ticket, ItemPtr> items_;
  std::map<std::uint64_t, Ticket> loans_;
  std::set<Ticket> dirty_;  // in memory alone, unpinned and not being written
  std::set<Ticket> clean_;  // in memory and written, unpinned
  std::set<Ticket> away_;   // on NVMe alone, and nobody reads them
  std::uint64_t dirty_bytes_ = 0;
  std::uint64_t lent_bytes_ = 0;
  std::size_t writing_ = 0, reading_ahead_ = 0, waiting_ = 0;
  std::uint64_t ahead_bytes_ = 0;  // brought ahead and not used yet
  Ticket brought_ = 0;             // the last that was brought since the last put, or 0
  Ticket last_ = 0;
  std::uint64_t last_loan_ = 0;
  bool settling_ = false;
  std::exception_ptr failure_;  // of a write, until somebody is told
  StashFigures figures_;
};

}  // namespace ziggurat
