// SPDX-License-Identifier: Apache-2.0
// base/topology/thread_place.cc: sched_setaffinity, there and back.
#include "base/topology/thread_place.h"

#include <fmt/format.h>

#include <cerrno>

#include "base/error.h"
#include "base/log.h"

namespace ziggurat {

ThreadPlace::ThreadPlace(std::span<const int> cpus, const std::string& what) {
  if (cpus.empty()) return;
  cpu_set_t wanted;
  CPU_ZERO(&wanted);
  for (const int cpu : cpus) CPU_SET(static_cast<unsigned>(cpu), &wanted);
  moved_ = ::sched_getaffinity(0, sizeof(before_), &before_) == 0 &&
           ::sched_setaffinity(0, sizeof(wanted), &wanted) == 0;
  if (moved_) return;
  note_degraded(
      "numa threads",
      fmt::format("the thread of {} cannot be moved to the CPUs of its NUMA node: {}; the "
                  "memory that it touches first lies on the node where it happens to run",
                  what, errno_text(errno)));
}

ThreadPlace::~ThreadPlace() {
  if (!moved_ || ::sched_setaffinity(0, sizeof(before_), &before_) == 0) return;
  note_degraded(
      "numa threads",
      fmt::format(
          "a thread cannot be given all its CPUs back: {}; the thread stays on one NUMA node",
          errno_text(errno)));
}

}  // namespace ziggurat
