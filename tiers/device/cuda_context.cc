// SPDX-License-Identifier: Apache-2.0
// tiers/device/cuda_context.cc: decides which errors lose a GPU and which concern one call, latches
// a loss, and keeps events for reuse.
#include "tiers/device/cuda_context.h"

#include <fmt/format.h>

#include "base/bytes.h"
#include "base/log.h"
#include "base/runtime/own_thread.h"

namespace ziggurat {
namespace {

std::string text_of(const CudaContext::Call& call) {
  return call.size_bytes == 0
             ? std::string(call.function)
             : fmt::format("{} of {}", call.function, format_bytes(call.size_bytes));
}

struct Verdict {
  bool lost;
  ErrorCode code;
};

/// Judges an error. Errors that concern one call are listed; every other one means that the GPU,
/// its context or its driver cannot be trusted any more. Most of those are documented to leave "the
/// process in an inconsistent state" (driver_types.h). An unknown error is treated like them, to be
/// safe.
Verdict verdict(cudaError_t error) noexcept {
  switch (error) {
    case cudaErrorMemoryAllocation:
    case cudaErrorLaunchOutOfResources: return {false, ErrorCode::kResourceExhausted};
    case cudaErrorNotSupported:
    case cudaErrorNotPermitted:
    case cudaErrorNotYetImplemented:
    case cudaErrorCallRequiresNewerDriver: return {false, ErrorCode::kUnimplemented};
    case cudaErrorInvalidValue:
    case cudaErrorInvalidConfiguration:
    case cudaErrorInvalidHostPointer:
    case cudaErrorInvalidDevicePointer:
    case cudaErrorInvalidMemcpyDirection:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidDevice:
    case cudaErrorInvalidResourceHandle:
    case cudaErrorHostMemoryAlreadyRegistered:
    case cudaErrorHostMemoryNotRegistered:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureMerge:
    case cudaErrorStreamCaptureUnmatched:
    case cudaErrorStreamCaptureUnjoined:
    case cudaErrorStreamCaptureIsolation:
    case cudaErrorStreamCaptureImplicit:
    case cudaErrorCapturedEvent:
    case cudaErrorStreamCaptureWrongThread: return {false, ErrorCode::kInvalidArgument};
    default: return {true, ErrorCode::kUnavailable};
  }
}

}  // namespace

std::string cuda_text(cudaError_t error) {
  return fmt::format("{} ({})", cudaGetErrorName(error), cudaGetErrorString(error));
}

CudaContext::CudaContext(int index, const std::string& name, DriverDeadlines deadlines)
    : index_(index),
      description_(fmt::format("cuda{} ({})", index, name)),
      watch_(description_, deadlines) {}

CudaContext::~CudaContext() {
  if (idle_events_.empty() || lost()) return;
  internal::on_own_thread([this] {  // the last Event may be destroyed on any thread
    for (const cudaEvent_t event : idle_events_) {
      call_at_end({"cudaEventDestroy"}, [event] { return cudaEventDestroy(event); });
    }
  });
}

CudaContext::Current::Current(CudaContext& context) : context_(context) {
  int before = -1;
  context.check(cudaGetDevice(&before), {"cudaGetDevice"});
  if (before == context.index_) return;
  context.check(cudaSetDevice(context.index_), {"cudaSetDevice"});
  if (!internal::is_own_thread()) before_ = before;
}

CudaContext::Current::~Current() {
  if (before_ >= 0 && !context_.lost()) static_cast<void>(cudaSetDevice(before_));
}

void CudaContext::check(cudaError_t result, const Call& what) {
  if (result == cudaSuccess) return;
  const auto [lost, code] = verdict(result);
  if (lost) {
    lose(result,
         fmt::format("{} was lost in {}: {}", description_, text_of(what), cuda_text(result)));
    require_present();
  }
  static_cast<void>(cudaGetLastError());  // otherwise the caller would find it when checking its
                                          // own launches
  throw Error(code, fmt::format("{}: {}: {}", description_, text_of(what), cuda_text(result)),
              static_cast<int>(result));
}

void CudaContext::lose(cudaError_t error, const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    if (!lost_why_.empty()) return;
    lost_why_ = why;
    lost_native_ = static_cast<int>(error);
    lost_.store(true, std::memory_order_release);
  }
  watch_.lost(why);
  log().error("{}", why);
}

void CudaContext::give_up(const std::string& why) {
  lose(cudaErrorUnknown, fmt::format("{} was given up: {}", description_, why));
}

void CudaContext::require_present() const {
  if (!lost()) return;
  const std::lock_guard lock(mutex_);
  throw Error(ErrorCode::kUnavailable,
              fmt::format("{}; start the process again, and if the GPU is lost again, look for Xid "
                          "lines in the kernel's "
                          "log",
                          lost_why_),
              lost_native_);
}

void CudaContext::warn(const Error& error) noexcept {
  log().warn("a device reported an error while it was closed: {}", error.what());
}

cudaEvent_t CudaContext::take_event() {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_events_.empty()) {
      const cudaEvent_t event = idle_events_.back();
      idle_events_.pop_back();
      return event;
    }
  }
  cudaEvent_t event = nullptr;
  // With a blocking sync, the waiter's thread sleeps instead of spinning.
  call({"cudaEventCreateWithFlags"}, [&event] {
    return cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync);
  });
  return event;
}

void CudaContext::give_back(cudaEvent_t event) noexcept {
  const std::lock_guard lock(mutex_);
  idle_events_.push_back(event);
}

}  // namespace ziggurat
