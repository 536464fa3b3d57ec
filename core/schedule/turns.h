// SPDX-License-Identifier: Apache-2.0
// core/schedule/turns.h: work that comes to a place in any order and leaves it in the order of its
// numbers: a second exchange among ranks, after a first that may end early or late.
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

  /// Of 0, 1, 2, ..: each once.
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
