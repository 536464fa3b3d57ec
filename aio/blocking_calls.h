// SPDX-License-Identifier: Apache-2.0
// aio/blocking_calls.h: chooses the thread for calls that name files (open, rename, remove, reserve
// space). Such a call returns when the drive or the server has answered; one that hangs may take
// minutes.
#pragma once

#include <functional>

#include "base/runtime/worker_pool.h"

namespace ziggurat {

class BlockingCalls {
 public:
  /// Runs the calls on the thread that asks: for start-up, and for programs that do nothing else.
  BlockingCalls() = default;
  /// Runs the calls on a thread of `pool`, whose other work may have to wait for them.
  explicit BlockingCalls(WorkerPool& pool) : pool_(&pool) {}

  /// Makes `calls` and rethrows what they threw. No other code may use what they touch until they
  /// have returned.
  Task<> run(Reactor& reactor, const std::function<void()>& calls) const {
    if (pool_ != nullptr) {
      co_await pool_->run(reactor, {.name = "name files", .bytes = 0, .decides = true}, calls);
    } else {
      calls();
    }
  }

 private:
  WorkerPool* pool_ = nullptr;
};

}  // namespace ziggurat
