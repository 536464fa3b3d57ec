// SPDX-License-Identifier: Apache-2.0
// base/runtime/for_each.cc: runs as many lanes as may be under way; each takes the next index.
#include "base/runtime/for_each.h"

#include <algorithm>

namespace ziggurat {
namespace {

Task<> run_lane(const WorkGroup& lanes, std::size_t count, std::size_t& next,
                const std::function<Task<>(std::size_t)>& work) {
  while (next < count && !lanes.failed()) {
    const auto index = next++;  // advanced before the wait, because other lanes take the next index
                                // meanwhile
    co_await work(index);
  }
}

}  // namespace

Task<> for_each_index(Reactor& reactor, std::size_t count, std::size_t at_once,
                      const std::function<Task<>(std::size_t)>& work) {
  std::size_t next = 0;
  WorkGroup lanes(reactor);
  for (std::size_t i = 0; i < std::min(count, at_once); ++i)
    lanes.spawn(run_lane(lanes, count, next, work));
  co_await lanes.wait_idle();
}

}  // namespace ziggurat
