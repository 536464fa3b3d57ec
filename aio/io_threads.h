// SPDX-License-Identifier: Apache-2.0
// aio/io_threads.h: transfers by pread, pwrite and fdatasync on a few threads, completed on the
// reactor's: what every engine of real files can fall back on.
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

  /// Ends the threads. On the reactor's thread, or when the reactor does not run. Waits for what
  /// they are at; what still waits, and what is submitted from now on, completes with -ECANCELED.
  void drain();

  std::uint32_t count() const noexcept;
  /// `fd` is the descriptor behind op.file, open until the operation completes.
  void submit(IoOp& op, int fd);
  std::size_t in_flight() const noexcept;

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with completions already posted
};

}  // namespace ziggurat
