// SPDX-License-Identifier: Apache-2.0
// base/runtime/for_each.h: does the same work on many things, a few of them at a time.
//
// One coroutine per thing would be the simplest pipeline. But a waiting coroutine keeps its frame,
// and with a hundred thousand things nearly all memory would be frames that wait. Reactor's thread
// only.
#pragma once

#include <cstddef>
#include <functional>

#include "base/runtime/async.h"

namespace ziggurat {

/// Runs work(0), .., work(count - 1), begun in this order, at most `at_once` of them under way.
/// After the first failure no other work is begun. Returns when all that were begun have ended, and
/// rethrows the failure. `work` must outlive the await.
Task<> for_each_index(Reactor& reactor, std::size_t count, std::size_t at_once,
                      const std::function<Task<>(std::size_t)>& work);

}  // namespace ziggurat
