// SPDX-License-Identifier: Apache-2.0
// base/runtime/own_thread.h: knows which threads the engine has started itself. Such a thread may
// change its own state, like its current GPU, because no other code sees that. A caller's thread
// must be left as it was.
#pragma once

#include <exception>
#include <thread>

namespace ziggurat::internal {

inline thread_local bool own_thread = false;

/// Marks the calling thread as the engine's, until it ends.
inline void take_thread() noexcept { own_thread = true; }
inline bool is_own_thread() noexcept { return own_thread; }

/// Runs `action` on a new thread of the engine, waits for it, and rethrows what it throws.
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
