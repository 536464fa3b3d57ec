// SPDX-License-Identifier: Apache-2.0
// tiers/device/cuda_waiter.h: the thread that blocks until the events of one CUDA stream have
// happened, one after another, and lets them happen.
//
// The driver's callbacks are not used: a callback keeps its stream waiting until it has run, may be
// serialized with those of other streams, must not call CUDA, and may never come after the loss of
// the device (cuda_runtime_api.h, cudaStreamAddCallback, cudaLaunchHostFunc). For builds with CUDA
// only.
#pragma once

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/runtime/reactor.h"
#include "tiers/device/cuda_context.h"
#include "tiers/device/event.h"

namespace ziggurat {

class CudaEvent final : public EventState {
 public:
  /// Takes over `handle`, which has been recorded; null if nothing was recorded.
  CudaEvent(std::shared_ptr<CudaContext> context, cudaEvent_t handle, Reactor& reactor,
            const void* queue, std::exception_ptr fate)
      : EventState(reactor, queue, std::move(fate)),
        context_(std::move(context)),
        handle_(handle) {}
  ~CudaEvent() override {
    if (handle_ != nullptr) context_->give_back(handle_);
  }
  cudaEvent_t handle() const noexcept { return handle_; }

 private:
  std::shared_ptr<CudaContext> context_;
  cudaEvent_t handle_;
};

/// Makes `stream` wait for `event`, without blocking this thread. Errors: kInvalidArgument for an
/// event that is not of CUDA; the event's own error, if it is known; kUnavailable if the device is
/// lost.
void queue_wait(CudaContext& context, cudaStream_t stream, const EventState& event);

class CudaWaiter {
 public:
  /// The owner of the stream. A caller may destroy its stream while events of it are still waited
  /// for.
  enum class Owner : std::uint8_t { kEngine, kCaller };
  /// The reactor must outlive the waiter, and so must a stream of the engine.
  CudaWaiter(std::shared_ptr<CudaContext> context, Reactor& reactor, cudaStream_t stream,
             Owner owner, const std::string& name);
  ~CudaWaiter();  ///< waits for every event

  /// Records an event. Thread-safe. Errors: those of cudaEventRecord; nothing was recorded then.
  std::shared_ptr<EventState> record(const void* queue);
  /// Makes an event without a record. It fails with `fate` when all work that the stream has queued
  /// so far has finished.
  std::shared_ptr<EventState> record_failure(const void* queue, std::exception_ptr fate);

 private:
  void work();
  std::exception_ptr wait_for(const CudaEvent& event);
  void push(std::shared_ptr<CudaEvent> event);

  std::shared_ptr<CudaContext> context_;
  Reactor& reactor_;
  cudaStream_t stream_;
  Owner owner_;
  std::string name_;

  std::mutex recording_;  // keeps events in the queue in the order in which they were recorded
  std::mutex mutex_;      // guards everything below
  std::condition_variable wake_;
  std::deque<std::shared_ptr<CudaEvent>> queue_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace ziggurat
