// SPDX-License-Identifier: Apache-2.0
// core/engine/stash/activation_stash.h: the stash for a trainer: calls that block, from any thread.
//
//   forward:   ticket = stash.put(bytes)
//   backward:  stash.read(ticket, {.into = values})
//   no longer needed: stash.drop(ticket)
//
// Without copies an item is filled between take() and filled(), and used between lend() and
// give_back().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/engine/engine_config.h"
#include "core/engine/runtime.h"
#include "core/stash/stash.h"

namespace ziggurat {

struct Storage;

class ActivationStash {
 public:
  using Ticket = Stash::Ticket;

  /// Takes `memory_bytes` of host memory, and makes files without names in the directories.
  /// `runtime` must outlive it. Errors: kInvalidArgument without a directory; those of Stash.
  ActivationStash(Runtime& runtime, const std::vector<StoreDirectory>& directories,
                  std::uint64_t memory_bytes);
  /// Waits for transfers. No other call may be under way.
  ~ActivationStash();

  /// Copies an item; the caller's memory is free when it returns. Errors: those of Stash::put();
  /// kResourceExhausted if what is lent would have to come back for it.
  Ticket put(std::span<const std::byte> bytes);
  /// Gives memory for an item, which the caller fills; then it calls filled(), or drop(). See
  /// Stash::put().
  Stash::Room take(std::uint64_t size_bytes);
  void filled(Ticket ticket);
  /// A part of an item, and where it is copied to.
  struct Part {
    std::uint64_t offset_bytes = 0;
    std::span<std::byte> into;
  };
  /// Copies a part of an item. Errors: those of Stash::bring(); kInvalidArgument if the item ends
  /// before the part.
  void read(Ticket ticket, const Part& part);
  /// Lends an item's memory until give_back(), or returns none: then read() it. See Stash::lend().
  Stash::Loan lend(Ticket ticket);
  void give_back(std::uint64_t loan);
  /// Forgets an item, when calls that read it have ended. Never waits; an unknown item is ignored.
  void drop(Ticket ticket);
  StashFigures figures();

 private:
  Runtime& runtime_;
  std::unique_ptr<Storage> storage_;
  std::unique_ptr<Stash> stash_;
};

}  // namespace ziggurat
