// SPDX-License-Identifier: Apache-2.0
// tiers/device/cuda_waiter.cc: records events. A loop waits for the oldest one, and lets it happen.
#include "tiers/device/cuda_waiter.h"

#include <fmt/format.h>
#include <pthread.h>

#include <utility>

#include "base/log.h"
#include "base/runtime/own_thread.h"

namespace ziggurat {

void queue_wait(CudaContext& context, cudaStream_t stream, const EventState& event) {
  const auto* its = dynamic_cast<const CudaEvent*>(&event);
  if (its == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a stream of {} cannot wait for an event of a device that is not a GPU",
                            context.description()));
  }
  if (its->handle() == nullptr) {
    if (const std::exception_ptr fate = its->fate()) std::rethrow_exception(fate);
  }
  context.call({"cudaStreamWaitEvent"},
               [&] { return cudaStreamWaitEvent(stream, its->handle(), cudaEventWaitDefault); });
}

CudaWaiter::CudaWaiter(std::shared_ptr<CudaContext> context, Reactor& reactor, cudaStream_t stream,
                       Owner owner, const std::string& name)
    : context_(std::move(context)), reactor_(reactor), stream_(stream), owner_(owner), name_(name) {
  thread_ = std::thread([this] { work(); });
}

CudaWaiter::~CudaWaiter() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

std::shared_ptr<EventState> CudaWaiter::record(const void* queue) {
  const std::lock_guard order(recording_);
  const cudaEvent_t handle = context_->take_event();
  // The event owns the handle from here on.
  auto event = std::make_shared<CudaEvent>(context_, handle, reactor_, queue, nullptr);
  context_->call({"cudaEventRecord"}, [&] { return cudaEventRecord(handle, stream_); });
  push(event);
  return event;
}

std::shared_ptr<EventState> CudaWaiter::record_failure(const void* queue, std::exception_ptr fate) {
  const std::lock_guard order(recording_);
  auto event = std::make_shared<CudaEvent>(context_, nullptr, reactor_, queue, std::move(fate));
  push(event);
  return event;
}

void CudaWaiter::push(std::shared_ptr<CudaEvent> event) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(event));
  }
  wake_.notify_one();
}

void CudaWaiter::work() {
  ::pthread_setname_np(::pthread_self(), ("zig-" + name_).substr(0, 15).c_str());
  internal::take_thread();
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    std::shared_ptr<CudaEvent> event = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    event->happen(wait_for(*event));
    event.reset();
    lock.lock();
  }
}

/// Blocks until the event has happened. If only the wait fails, the transfer may still be under
/// way. Then the whole stream is waited for, or the same event again if the stream is a caller's.
/// If that fails too, the device is given up.
std::exception_ptr CudaWaiter::wait_for(const CudaEvent& event) {
  const auto event_ended = [&] { return cudaEventSynchronize(event.handle()); };
  const auto stream_ended = [&] { return cudaStreamSynchronize(stream_); };
  try {
    if (event.handle() != nullptr) {
      context_->call({"cudaEventSynchronize"}, event_ended);
      context_->require_present();  // a lost device's waits may return at once
      return nullptr;
    }
  } catch (const Error& failed) {
    if (context_->lost()) return std::current_exception();
    log().warn("stream {}: {}; waiting again", name_, failed.what());
  }
  try {
    if (owner_ == Owner::kCaller) {
      context_->call({"cudaEventSynchronize"}, event_ended);
    } else {
      context_->call({"cudaStreamSynchronize"}, stream_ended);
    }
    context_->require_present();
  } catch (const Error& failed) {
    if (!context_->lost()) {
      context_->give_up(
          fmt::format("this process cannot find out whether the work of stream {} has ended: {}",
                      name_, failed.what()));
    }
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace ziggurat
