// SPDX-License-Identifier: Apache-2.0
// tiers/cuda_waiter.h: the thread that blocks until the events of one CUDA stream have happened,
// one after another, and posts what follows to the reactor in batches.
//
// Not callbacks of the driver's: a callback keeps its stream waiting until it has run, may be
// serialised with those of other streams, must not call CUDA, and after the loss of the device may
// never come (cuda_runtime_api.h, cudaStreamAddCallback, cudaLaunchHostFunc). For builds with CUDA
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
#include "tiers/cuda_context.h"
#include "tiers/event.h"

namespace ziggurat {

class CudaEvent final : public EventState {
 public:
  /// Takes `handle`, which has been recorded; null if nothing was.
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

/// Makes `stream` wait for `event`, without blocking anybody.
/// Errors: kInvalidArgument for an event that is not of CUDA; the event's own, if it is known;
/// kUnavailable when the device is lost.
void queue_wait(CudaContext& context, cudaStream_t stream, const EventState& event);

class CudaWaiter {
 public:
  /// Whose stream it waits for. A caller may destroy his while its events are still waited for.
  enum class Owner : std::uint8_t { kEngine, kCaller };
  /// The reactor must outlive it, and so must a stream of the engine's.
  CudaWaiter(std::shared_ptr<CudaContext> context, Reactor& reactor, cudaStream_t stream,
             Owner owner, const std::string& name);
  ~CudaWaiter();  ///< waits for every event

  /// Thread-safe. Errors: what cudaEventRecord says; nothing was recorded then.
  std::shared_ptr<EventState> record(const void* queue);
  /// An event without a record, which will fail with `fate` when all that the stream has queued so
  /// far has finished.
  std::shared_ptr<EventState> record_failure(const void* queue, std::exception_ptr fate);

 private:
  void work();
  std::exception_ptr wait_for(const CudaEvent& event);
  bool has_happened(const CudaEvent& event, std::exception_ptr& error);
  void push(std::shared_ptr<CudaEvent> event);

  std::shared_ptr<CudaContext> context_;
  Reactor& reactor_;
  cudaStream_t stream_;
  Owner owner_;
  std::string name_;

  std::mutex recording_;  // events are queued in the order in which they were recorded
  std::mutex mutex_;      // all below
  std::condition_variable wake_;
  std::deque<std::shared_ptr<CudaEvent>> queue_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace ziggurat
