// SPDX-License-Identifier: Apache-2.0
// aio/thread_engine.h: IoEngine by pread and pwrite on a few threads. Works wherever files do.
//
// Each thread has one transfer in flight, so the queue depth is the number of threads.
#pragma once

#include <string>

#include "aio/io_threads.h"
#include "aio/posix_files.h"
#include "base/runtime/reactor.h"

namespace ziggurat {

class ThreadEngine final : public PosixFiles {
 public:
  static constexpr std::uint32_t kThreads = 4;

  /// The destructor cancels as IoThreads' does.
  explicit ThreadEngine(Reactor& reactor, std::uint32_t threads = kThreads);

  std::string description() const override;
  std::uint32_t queue_depth() const noexcept override { return threads_.count(); }
  void register_memory(std::span<std::byte>) override {}  // threads gain nothing from registered
                                                          // memory
  void submit(IoOp& op) override { threads_.submit(op, descriptor(op.file).fd); }
  std::size_t in_flight() const noexcept override { return threads_.in_flight(); }

 private:
  IoThreads threads_;
};

}  // namespace ziggurat
