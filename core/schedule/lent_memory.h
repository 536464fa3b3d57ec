// SPDX-License-Identifier: Apache-2.0
// core/schedule/lent_memory.h: when memory that a trainer lends is its own again: no job on a
// worker is in it. Reactor's thread only.
//
// A job runs to its end, whatever has failed meanwhile; so whoever tells the trainer that the
// engine has ended waits for those under way first, and no other begins. Transfers are not waited
// for: they are of the engine's own memory, and a drive may hang.
#pragma once

#include <cstddef>

#include "base/runtime/async.h"

namespace ziggurat {

class LentMemory {
 public:
  LentMemory(Reactor& reactor, const CancelScope& cancel) : cancel_(cancel), idle_(reactor) {
    idle_.set();
  }

  /// A job is in lent memory as long as this lives. Errors: the scope's, once that is cancelled.
  class Use {
   public:
    explicit Use(LentMemory& of) : of_(of) {
      of.cancel_.check();
      if (of.count_++ == 0) of.idle_.reset();
    }
    ~Use() {
      if (--of_.count_ == 0) of_.idle_.set();
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    LentMemory& of_;
  };

  /// Returns when no job is in it; where the scope is cancelled, for good.
  Task<> idle() {
    while (count_ > 0) co_await idle_.wait();  // more may have begun before we resumed
  }

 private:
  const CancelScope& cancel_;
  std::size_t count_ = 0;
  Signal idle_;
};

}  // namespace ziggurat
