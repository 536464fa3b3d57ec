// SPDX-License-Identifier: Apache-2.0
// aio/thread_engine.h: IoEngine by pread and pwrite on a few threads: works wherever files do.
//
// Each thread has one transfer in flight, so the queue depth is the number of threads.
#pragma once

#include <memory>
#include <string>

#include "aio/posix_files.h"
#include "base/runtime/reactor.h"

namespace ziggurat {

class ThreadEngine final : public PosixFiles {
 public:
  static constexpr std::uint32_t kThreads = 4;

  explicit ThreadEngine(Reactor& reactor, std::uint32_t threads = kThreads);
  /// On the reactor's thread, or when the reactor does not run. Waits for what threads are at; what
  /// still waited in the queue completes with -ECANCELED.
  ~ThreadEngine() override;

  std::string description() const override;
  std::uint32_t queue_depth() const noexcept override;
  void register_memory(std::span<std::byte>) override {}  // threads gain nothing from it
  void submit(IoOp& op) override;
  std::size_t in_flight() const noexcept override;

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with completions already posted
};

}  // namespace ziggurat
