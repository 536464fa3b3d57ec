// SPDX-License-Identifier: Apache-2.0
// base/topology/thread_place.h: the calling thread on a node's CPUs for a while.
//
// Where the kernel takes no memory policy (mbind and set_mempolicy need CAP_SYS_NICE in most
// containers), this is what remains: a page lies on the node of the CPU that first touches it, ring
// memory on the node of the CPU that asks for it, and a thread is born where its parent runs.
#pragma once

#include <sched.h>

#include <span>
#include <string>

namespace ziggurat {

/// Until its end the calling thread, and whatever it starts, runs on `cpus` only. Nothing happens
/// if there are none; what the kernel refuses is noted (base/log.h) and done without. Ends on the
/// thread it began on.
class ThreadPlace {
 public:
  /// `what` is placed so: for the note.
  ThreadPlace(std::span<const int> cpus, const std::string& what);
  ~ThreadPlace();
  ThreadPlace(const ThreadPlace&) = delete;
  ThreadPlace& operator=(const ThreadPlace&) = delete;

 private:
  cpu_set_t before_;
  bool moved_ = false;
};

}  // namespace ziggurat
