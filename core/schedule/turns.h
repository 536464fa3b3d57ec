// SPDX-License-Identifier: Apache-2.0
// core/schedule/turns.h: lets work that arrives in any order go on in the order of its numbers. For
// example, a second exchange among ranks needs the same order on all ranks, though the first
// exchanges may end in any order.
//
//   co_await turns.wait(number);  make the call;  turns.next();
//
// Reactor's thread only.
#pragma once

#include <cstdint>

#include "base/runtime/async.h"

namespace ziggurat {

class Turns {
 public:
  explicit Turns(CancelScope& cancel) : changed_(cancel) {}

  /// Waits for the turn of `number`. Each number 0, 1, 2, ... is waited for once.
  Task<> wait(std::uint64_t number) {
    while (turn_ != number) {
      changed_.reset();
      co_await changed_.wait();
    }
  }
  void next() {
    ++turn_;
    changed_.set();
  }

 private:
  std::uint64_t turn_ = 0;
  Signal changed_;
};

}  // namespace ziggurat
