// SPDX-License-Identifier: Apache-2.0
// base/runtime/for_each.h: the same work on many things, a few of them at a time.
//
// A coroutine for each of them would be the simplest pipeline, but whoever waits has a stack, and
// with a hundred thousand things nearly all of them would be stacks that wait for memory. Reactor's
// thread only.
#pragma once

#include <cstddef>
#include <functional>

#include "base/runtime/async.h"

namespace ziggurat {

/// Runs work(0), .., work(count - 1), begun in this order, at most `at_once` of them under way.
/// After the first failure no other is begun; returns when all that were begun have ended, and
/// rethrows it. `work` must outlive the await.
Task<> for_each_index(Reactor& reactor, std::size_t count, std::size_t at_once,
                      const std::function<Task<>(std::size_t)>& work);

}  // namespace ziggurat
