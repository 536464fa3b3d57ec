// SPDX-License-Identifier: Apache-2.0
// collectives/nccl/nccl_lane.h: the thread that makes every call of NCCL and of its stream.
//
// Jobs run one after the other, and each returns when its bytes are there. After the first job that
// fails, all groups are aborted, and every later job fails with the same error.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "base/error.h"
#include "base/runtime/async.h"
#include "collectives/nccl/nccl_device.h"

namespace ziggurat {

class NcclLane {
 public:
  using Job = std::function<void(NcclDevice&)>;

  NcclLane(Reactor& reactor, std::unique_ptr<NcclDevice> device);
  /// Ends the lane as end() does; jobs that are left tell nobody.
  ~NcclLane();
  NcclLane(const NcclLane&) = delete;
  NcclLane& operator=(const NcclLane&) = delete;

  /// Queues `job`; the Task ends when the job ends. `job` must own nothing that has to be destroyed
  /// on another thread. Reactor's thread.
  Task<> run(Job job);
  void give_up() noexcept { device_->give_up(); }
  /// Makes the jobs that are left fail, aborts what is not finished, and ends the thread. Nothing
  /// is posted to the reactor afterwards.
  void end();
  const NcclDevice& device() const noexcept { return *device_; }

 private:
  struct Item {
    explicit Item(Reactor& reactor) : done(reactor) {}
    Job job;
    Signal done;
  };
  static Task<> wait(std::shared_ptr<Item> item) { co_await item->done.wait(); }
  void loop();
  void work(std::shared_ptr<Item> item);
  void tell(std::shared_ptr<Item> item, const std::optional<Error>& fault);

  Reactor& reactor_;
  std::unique_ptr<NcclDevice> device_;
  std::optional<Error> failure_;  // used by the lane's thread only
  std::mutex mutex_;
  std::condition_variable woken_;
  std::deque<std::shared_ptr<Item>> queue_;
  std::shared_ptr<Item> untold_;  // destroyed with the lane, not on its thread
  bool stopping_ = false;
  bool silent_ = false;
  std::thread thread_;
};

}  // namespace ziggurat
