// SPDX-License-Identifier: Apache-2.0
// base/runtime/own_thread.h: which threads the engine has started itself. What such a thread
// changes for itself, as the GPU that is current on it, nobody else sees; a caller's thread is left
// as it was.
#pragma once

#include <exception>
#include <thread>

namespace ziggurat::internal {

inline thread_local bool own_thread = false;

/// The calling thread is the engine's, to its end.
inline void take_thread() noexcept { own_thread = true; }
inline bool is_own_thread() noexcept { return own_thread; }

/// Runs `action` on a thread of the engine's, waits for it, and rethrows what it throws.
template <class Action>
void on_own_thread(const Action& action) {
  std::exception_ptr error;
  std::thread thread([&] {
    take_thread();
    try {
      action();
    } catch (...) {
      error = std::current_exception();
    }
  });
  thread.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace ziggurat::internal
