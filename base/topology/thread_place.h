// SPDX-License-Identifier: Apache-2.0
// base/topology/thread_place.h: keeps the calling thread on a NUMA node's CPUs for a while.
//
// This is what remains if the kernel accepts no memory policy (mbind and set_mempolicy need
// CAP_SYS_NICE in most containers): a page lies on the node of the CPU that first touches it, a
// ring's memory on the node of the CPU that asks for it, and a thread starts where its parent runs.
#pragma once

#include <sched.h>

#include <span>
#include <string>

namespace ziggurat {

/// Keeps the calling thread, and every thread that it starts, on `cpus` until this object is
/// destroyed. Does nothing if `cpus` is empty. If the kernel refuses, that is noted (base/log.h)
/// and the thread runs anywhere. Destroyed on the thread that made it.
class ThreadPlace {
 public:
  /// `what` names the thread's work in that note.
  ThreadPlace(std::span<const int> cpus, const std::string& what);
  ~ThreadPlace();
  ThreadPlace(const ThreadPlace&) = delete;
  ThreadPlace& operator=(const ThreadPlace&) = delete;

 private:
  cpu_set_t before_;
  bool moved_ = false;
};

}  // namespace ziggurat
