// SPDX-License-Identifier: Apache-2.0
// core/engine/stash/activation_stash.h: the stash for a trainer: calls that block, from any thread.
//
//   forward:   ticket = stash.put(bytes)
//   backward:  values = stash.bring(ticket); compute; stash.release(ticket)
//   no longer needed: stash.drop(ticket)
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
  /// Waits for transfers. No other call may be under way, and no item may be in use.
  ~ActivationStash();

  /// Copies an item; the caller's memory is free when it returns. Errors: those of Stash::put().
  Ticket put(std::span<const std::byte> bytes);
  /// Returns an item's bytes, which stay until as many calls of release(). Errors: those of
  /// Stash::bring().
  std::span<const std::byte> bring(Ticket ticket);
  /// Errors: kInvalidArgument for an item that is not in use.
  void release(Ticket ticket);
  /// Forgets an item, at its last release() if it is in use. Never waits; an unknown item is
  /// ignored.
  void drop(Ticket ticket);
  StashFigures figures();

 private:
  Runtime& runtime_;
  std::unique_ptr<Storage> storage_;
  std::unique_ptr<Stash> stash_;
};

}  // namespace ziggurat
