// SPDX-License-Identifier: Apache-2.0
// core/schedule/lent_memory.h: counts the jobs that use memory which a trainer lends, so that the
// trainer knows when it may use its memory again. Reactor's thread only.
//
// A job runs to its end, whatever has failed meanwhile. So before the trainer is told that the
// engine has ended, the engine waits for the jobs under way, and no other job begins. Nobody waits
// for transfers: they use only the engine's own memory, and a drive may hang.
#pragma once

#include <cstddef>

#include "base/runtime/async.h"

namespace ziggurat {

class LentMemory {
 public:
  LentMemory(Reactor& reactor, const CancelScope& cancel) : cancel_(cancel), idle_(reactor) {
    idle_.set();
  }

  /// Marks that a job uses lent memory, for as long as this object lives. Errors: the scope's, once
  /// that is cancelled.
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

  /// Returns when no job uses lent memory. If the scope is cancelled, no job ever begins
  /// afterwards.
  Task<> idle() {
    while (count_ > 0) co_await idle_.wait();  // another job may have begun before this resumed
  }

 private:
  const CancelScope& cancel_;
  std::size_t count_ = 0;
  Signal idle_;
};

}  // namespace ziggurat
