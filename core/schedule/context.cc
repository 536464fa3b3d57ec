// SPDX-License-Identifier: Apache-2.0
// core/schedule/context.cc: how a background pipeline's failure becomes the run's.
#include "core/schedule/context.h"

#include <utility>

namespace ziggurat {

void Context::spawn(Task<> task) { tasks.spawn(guarded(std::move(task))); }

Task<> Context::guarded(Task<> task) {
  std::exception_ptr error;
  try {
    co_await std::move(task);
  } catch (...) {
    error = std::current_exception();
  }
  if (error) fail(error);
}

}  // namespace ziggurat
