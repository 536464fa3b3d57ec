// SPDX-License-Identifier: Apache-2.0
// aio/blocking_calls.h: where calls are made that name files (open, rename, remove, reserve space).
// They return when the drive or the server behind them has answered, and one that hangs may take
// minutes.
#pragma once

#include <functional>

#include "base/runtime/worker_pool.h"

namespace ziggurat {

class BlockingCalls {
 public:
  /// On the thread that asks: for start-up, and for programs that do nothing else.
  BlockingCalls() = default;
  /// On the pool's, whose work may wait that long.
  explicit BlockingCalls(WorkerPool& pool) : pool_(&pool) {}

  /// Makes `calls` and rethrows what they threw. Nothing else uses what they touch meanwhile.
  Task<> run(Reactor& reactor, const std::function<void()>& calls) const {
    if (pool_ != nullptr) {
      co_await pool_->run(reactor, "name files", calls);
    } else {
      calls();
    }
  }

 private:
  WorkerPool* pool_ = nullptr;
};

}  // namespace ziggurat
