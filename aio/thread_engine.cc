// SPDX-License-Identifier: Apache-2.0
// aio/thread_engine.cc: combines the operating system's files with threads (io_threads.h).
#include "aio/thread_engine.h"

#include <fmt/format.h>

namespace ziggurat {

ThreadEngine::ThreadEngine(Reactor& reactor, std::uint32_t threads) : threads_(reactor, threads) {}

std::string ThreadEngine::description() const {
  return fmt::format("threads ({}, pread and pwrite)", queue_depth());
}

}  // namespace ziggurat
