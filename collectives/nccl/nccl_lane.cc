// SPDX-License-Identifier: Apache-2.0
// collectives/nccl/nccl_lane.cc: a queue, and the thread that serves it.
#include "collectives/nccl/nccl_lane.h"

#include <utility>

#include "base/runtime/work_ended.h"

namespace ziggurat {

NcclLane::NcclLane(Reactor& reactor, std::unique_ptr<NcclDevice> device)
    : reactor_(reactor), device_(std::move(device)) {
  thread_ = std::thread([this] { loop(); });
}

NcclLane::~NcclLane() {
  {
    const std::lock_guard lock(mutex_);
    silent_ = true;
  }
  end();
}

void NcclLane::end() {
  if (!thread_.joinable()) return;
  device_->give_up();
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  woken_.notify_one();
  thread_.join();
}

Task<> NcclLane::run(Job job) {
  auto item = std::make_shared<Item>(reactor_);
  item->job = std::move(job);
  reactor_.external_begin();
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(item);
  }
  woken_.notify_one();
  return wait(std::move(item));
}

void NcclLane::loop() {
  for (;;) {
    std::shared_ptr<Item> item;
    {
      std::unique_lock lock(mutex_);
      woken_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) break;
      item = std::move(queue_.front());
      queue_.pop_front();
    }
    work(std::move(item));
  }
  // Done on this thread, because it made the groups and has their device current.
  device_->abort();
  device_->release();
}

void NcclLane::work(std::shared_ptr<Item> item) {
  std::optional<Error> fault = failure_;
  if (!fault) {
    try {
      item->job(*device_);
    } catch (const Error& error) {
      fault = error;
    }
  }
  if (fault && !failure_) {
    failure_ = fault;
    device_->abort();  // before anything hears of the failure, because buffers are given back with
                       // it
  }
  tell(std::move(item), fault);
}

void NcclLane::tell(std::shared_ptr<Item> item, const std::optional<Error>& fault) {
  // The reactor may be ending, and once ~NcclLane has begun nothing waits for the item any more.
  const std::lock_guard lock(mutex_);
  if (silent_) {
    untold_ = std::move(item);
    return;
  }
  reactor_.post([&reactor = reactor_, item = std::move(item), fault] {
    work_ended(reactor);
    if (!fault) return item->done.set();
    item->done.fail(std::make_exception_ptr(*fault));
  });
}

}  // namespace ziggurat
