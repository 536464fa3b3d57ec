// SPDX-License-Identifier: Apache-2.0
// aio/io_threads.h: makes transfers with pread, pwrite and fdatasync on a few threads and completes
// them on the reactor's thread. Every engine of real files can fall back on it.
//
// Each thread has one transfer in flight; more wait, in order. Reactor's thread, except in the
// destructor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "aio/io_engine.h"
#include "base/runtime/reactor.h"

namespace ziggurat {

class IoThreads {
 public:
  IoThreads(Reactor& reactor, std::uint32_t threads);
  ~IoThreads() { drain(); }
  IoThreads(const IoThreads&) = delete;

  /// Ends the threads. Called on the reactor's thread, or when the reactor does not run. Waits for
  /// the transfers that the threads have begun; those still waiting, and those submitted from now
  /// on, complete with -ECANCELED.
  void drain();

  std::uint32_t count() const noexcept;
  /// Queues `op`. `fd` is the descriptor of op.file; it stays open until the operation completes.
  void submit(IoOp& op, int fd);
  std::size_t in_flight() const noexcept;

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with completions already posted
};

}  // namespace ziggurat
