// SPDX-License-Identifier: Apache-2.0
// tiers/device/cuda_stream.cc: queues the work of a stream with the driver.
#include "tiers/device/cuda_stream.h"

#include <fmt/format.h>

#include <utility>

#include "base/log.h"

namespace ziggurat {
namespace {

cudaMemcpyKind kind_of(Stream::Direction direction) noexcept {
  switch (direction) {
    case Stream::Direction::kToDevice: return cudaMemcpyHostToDevice;
    case Stream::Direction::kToHost: return cudaMemcpyDeviceToHost;
    case Stream::Direction::kOnDevice: break;
  }
  return cudaMemcpyDeviceToDevice;
}

}  // namespace

CudaQueue::CudaQueue(std::shared_ptr<CudaContext> context, StreamPriority priority)
    : context_(std::move(context)) {
  int least = 0;
  int greatest = 0;  // the lower number
  context_->call({"cudaDeviceGetStreamPriorityRange"},
                 [&] { return cudaDeviceGetStreamPriorityRange(&least, &greatest); });
  const int number = priority == StreamPriority::kHigh ? greatest : least;
  context_->call({"cudaStreamCreateWithPriority"}, [&] {
    return cudaStreamCreateWithPriority(&handle_, cudaStreamNonBlocking, number);
  });
}

CudaQueue::~CudaQueue() {
  if (handle_ == nullptr) return;
  context_->call_at_end({"cudaStreamDestroy"}, [this] { return cudaStreamDestroy(handle_); });
}

CudaStream::CudaStream(CudaParts parts, const Home& home, const std::string& name,
                       StreamPriority priority)
    : Stream(home, name),
      parts_(std::move(parts)),
      queue_(parts_.context, priority),
      waiter_(parts_.context, home.reactor, queue_.handle(), CudaWaiter::Owner::kEngine, name) {}

/// Queues row by row: cudaMemcpy2DAsync takes no strides of 2 GiB and more.
void CudaStream::queue_copy(const Copy& copy, std::shared_ptr<void>& kept) {
  std::shared_ptr<void> host_side;
  if (copy.direction == Direction::kToDevice) {
    host_side = parts_.host_memory->begin_copy({copy.source, copy.source_reach()});
  } else if (copy.direction == Direction::kToHost) {
    host_side = parts_.host_memory->begin_copy({copy.destination, copy.destination_reach()});
  }
  for (std::uint64_t row = 0; row < copy.rows; ++row) {
    parts_.context->call({"cudaMemcpyAsync", copy.size_bytes}, [&] {
      return cudaMemcpyAsync(copy.destination + row * copy.destination_stride_bytes,
                             copy.source + row * copy.source_stride_bytes, copy.size_bytes,
                             kind_of(copy.direction), queue_.handle());
    });
    if (row == 0) kept = host_side;
  }
}

void CudaStream::queue_wait(const std::shared_ptr<EventState>& event) {
  ziggurat::queue_wait(*parts_.context, queue_.handle(), *event);
}

std::shared_ptr<EventState> CudaStream::queue_record(std::exception_ptr fate) {
  const Stream* queue = this;
  if (!fate) {
    try {
      return waiter_.record(queue);
    } catch (const Error&) {
      fate = std::current_exception();
    }
  }
  return waiter_.record_failure(queue, std::move(fate));
}

// Events of a caller's stream belong to no queue, because the handle may name another stream later.
CudaCallerStream::CudaCallerStream(std::shared_ptr<CudaContext> context, Reactor& reactor,
                                   cudaStream_t handle)
    : context_(std::move(context)),
      handle_(handle),
      waiter_(context_, reactor, handle, CudaWaiter::Owner::kCaller, "caller's stream") {}

/// Throws if the stream captures a graph. An event recorded then becomes a node of the graph and
/// never happens by itself, and to wait for an event from outside breaks the capture.
void CudaCallerStream::refuse_capture() const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  context_->call({"cudaStreamIsCapturing"}, [&] {
    const cudaError_t result = cudaStreamIsCapturing(handle_, &status);
    // The legacy default stream cannot be used while a blocking stream captures.
    if (result != cudaErrorStreamCaptureImplicit) return result;
    static_cast<void>(cudaGetLastError());
    status = cudaStreamCaptureStatusActive;
    return cudaSuccess;
  });
  if (status == cudaStreamCaptureStatusNone) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format(
          "{} cannot use the caller's stream {}, which is capturing a CUDA graph or is the legacy "
          "default stream while another stream captures; call the engine before or after "
          "the capture",
          context_->description(), fmt::ptr(static_cast<void*>(handle_))));
}

Event CudaCallerStream::record() {
  refuse_capture();
  return Event(waiter_.record(nullptr));
}

void CudaCallerStream::wait(const Event& event) {
  refuse_capture();
  const std::shared_ptr<EventState>& state = event.state();
  if (state == nullptr) return;
  if (const std::exception_ptr fate = state->fate()) std::rethrow_exception(fate);
  if (!state->happened()) ziggurat::queue_wait(*context_, handle_, *state);
}

}  // namespace ziggurat
