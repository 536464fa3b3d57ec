// SPDX-License-Identifier: Apache-2.0
// tiers/device/cuda_stream.h: streams of one GPU: the engine's own, and those of callers. For
// builds with CUDA only.
#pragma once

#include <memory>
#include <string>

#include "tiers/device/cuda_host_memory.h"
#include "tiers/device/cuda_waiter.h"
#include "tiers/device/stream.h"

namespace ziggurat {

/// The parts of a CUDA device that its streams share.
struct CudaParts {
  std::shared_ptr<CudaContext> context;
  std::shared_ptr<CudaHostMemory> host_memory;
};

/// A stream of the driver. The destructor destroys it when its work has ended, unless the device is
/// lost.
class CudaQueue {
 public:
  /// Makes a non-blocking stream: neither it nor the legacy default stream waits for the other.
  CudaQueue(std::shared_ptr<CudaContext> context, StreamPriority priority);
  ~CudaQueue();
  CudaQueue(const CudaQueue&) = delete;
  CudaQueue& operator=(const CudaQueue&) = delete;
  cudaStream_t handle() const noexcept { return handle_; }
  /// Keeps the stream from ever being destroyed, because it is not known whether its work has
  /// ended.
  void abandon() noexcept { handle_ = nullptr; }

 private:
  std::shared_ptr<CudaContext> context_;
  cudaStream_t handle_ = nullptr;
};

class CudaStream final : public Stream {
 public:
  CudaStream(CudaParts parts, const Home& home, const std::string& name, StreamPriority priority);

  void* native_handle() const noexcept override { return queue_.handle(); }

 protected:
  void queue_copy(const Copy& copy, std::shared_ptr<void>& kept) override;
  void queue_wait(const std::shared_ptr<EventState>& event) override;
  std::shared_ptr<EventState> queue_record(std::exception_ptr fate) override;

 private:
  CudaParts parts_;
  CudaQueue queue_;
  CudaWaiter waiter_;  // destroyed before the stream
};

/// A stream that belongs to a caller. Any thread.
class CudaCallerStream final : public StreamRef {
 public:
  CudaCallerStream(std::shared_ptr<CudaContext> context, Reactor& reactor, cudaStream_t handle);

  Event record() override;
  void wait(const Event& event) override;

 private:
  void refuse_capture() const;

  std::shared_ptr<CudaContext> context_;
  cudaStream_t handle_;
  CudaWaiter waiter_;
};

}  // namespace ziggurat
