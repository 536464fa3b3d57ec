// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/api_stream.cc: streams, events and host functions.
#include <algorithm>
#include <thread>

#include "tests/cuda_double/api.h"

namespace ziggurat::cuda_double {
namespace {

constexpr std::uint64_t kMarkNs = 200;
constexpr std::uint64_t kHostFunctionNs = 2000;

CUstream_st& new_stream(Machine& its) {
  its.streams.push_back(std::make_unique<CUstream_st>());
  CUstream_st& created = *its.streams.back();
  created.device = current_device();
  created.actor = static_cast<Actor>(its.streams.size());
  return created;
}

/// "The per-thread default stream is an implicit stream local to both the thread and the CUcontext,
/// and which does not synchronize with other streams (just like explicitly created streams)"; it
/// "is not a non-blocking stream and will synchronize with the legacy default stream" ("Stream
/// synchronization behavior"; the handle is driver_types.h:113-121).
CUstream_st* thread_stream(Machine& its) {
  static_cast<void>(current(its));
  CUstream_st*& stream = its.thread_streams[{std::this_thread::get_id(), current_device()}];
  if (stream == nullptr) {
    stream = &new_stream(its);
    stream->implicit = true;
  }
  return stream;
}

/// "When a blocking stream is capturing, the legacy stream is in an unusable state until the
/// blocking stream capture is terminated" (cuda_runtime_api.h:2608-2611).
bool unusable(const Machine& its, const CUstream_st* stream) {
  return stream == its.devices[static_cast<std::size_t>(stream->device)]->null_stream &&
         std::ranges::any_of(its.streams, [stream](const auto& other) {
           return other->capturing && other->device == stream->device &&
                  (other->flags & cudaStreamNonBlocking) == 0;
         });
}

cudaError_t create_stream(cudaStream_t* stream, const char* name, unsigned flags, int priority) {
  return call(name, [&](Machine& its, auto&) {
    if ((flags & ~unsigned{cudaStreamNonBlocking}) != 0) return cudaErrorInvalidValue;
    static_cast<void>(current(its));
    CUstream_st& created = new_stream(its);
    created.flags = flags;
    created.priority = std::clamp(priority, -5, 0);  // "clamped to the nearest" of the range
    *stream = &created;
    return cudaSuccess;
  });
}

/// "In case the device is still doing work in the stream ... the function will return immediately"
/// (cuda_runtime_api.h:2165-2168): allowed, but nobody can wait for that work, so it is a finding.
cudaError_t destroy_stream(Machine& its, cudaStream_t handle) {
  CUstream_st* stream = stream_of(its, handle, "cudaStreamDestroy");
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (stream->implicit) return cudaErrorInvalidResourceHandle;
  if (!its.idle(stream)) {
    its.find(fmt::format("cudaStreamDestroy: {} on stream {} is under way",
                         stream->queue.back()->what, stream->actor));
  }
  stream->destroyed = true;
  return cudaSuccess;
}

}  // namespace

CUstream_st* stream_of(Machine& its, cudaStream_t handle, const char* name) {
  if (handle == nullptr || handle == cudaStreamLegacy) return current(its).null_stream;
  if (handle == cudaStreamPerThread) return thread_stream(its);
  const auto at = std::find_if(its.streams.begin(), its.streams.end(),
                               [&](const auto& one) { return one.get() == handle; });
  CUstream_st* stream = at == its.streams.end() ? nullptr : at->get();
  if (stream != nullptr && !stream->destroyed) return stream;
  its.find(fmt::format("{}: the stream {}", name,
                       stream == nullptr ? "does not exist" : "was destroyed"));
  return nullptr;
}

CUevent_st* event_of(Machine& its, cudaEvent_t handle, const char* name) {
  const auto at = its.events.find(handle);
  CUevent_st* event = at == its.events.end() ? nullptr : at->second.get();
  if (event != nullptr && !event->destroyed) return event;
  its.find(
      fmt::format("{}: the event {}", name, event == nullptr ? "does not exist" : "was destroyed"));
  return nullptr;
}

cudaError_t open_for_work(CUstream_st* stream) noexcept {
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (unusable(machine(), stream)) return cudaErrorStreamCaptureImplicit;
  return stream->capturing ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

}  // namespace ziggurat::cuda_double

using namespace ziggurat::cuda_double;

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return create_stream(stream, "cudaStreamCreate", 0, 0);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return create_stream(stream, "cudaStreamCreateWithFlags", flags, 0);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return create_stream(stream, "cudaStreamCreateWithPriority", flags, priority);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return call("cudaStreamDestroy",
              [&](Machine& its, auto&) { return destroy_stream(its, stream); });
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  return call("cudaStreamGetPriority", [&](Machine& its, auto&) {
    CUstream_st* stream = stream_of(its, handle, "cudaStreamGetPriority");
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    *priority = stream->priority;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  return call("cudaStreamGetDevice", [&](Machine& its, auto&) {
    CUstream_st* stream = stream_of(its, handle, "cudaStreamGetDevice");
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    *device = stream->device;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return call("cudaStreamSynchronize", [&](Machine& its, Machine::Lock& lock) {
    CUstream_st* stream = stream_of(its, handle, "cudaStreamSynchronize");
    if (const cudaError_t error = open_for_work(stream); error != cudaSuccess) return error;
    return its.wait_for(lock, its.last_of(stream));
  });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return call("cudaStreamQuery", [&](Machine& its, Machine::Lock& lock) {
    CUstream_st* stream = stream_of(its, handle, "cudaStreamQuery");
    if (const cudaError_t error = open_for_work(stream); error != cudaSuccess) return error;
    return its.query(lock, its.last_of(stream));
  });
}

cudaError_t cudaDeviceSynchronize() {
  return call("cudaDeviceSynchronize", [&](Machine& its, Machine::Lock& lock) {
    static_cast<void>(current(its));
    const int device = current_device();
    for (std::size_t i = 0; i < its.streams.size(); ++i) {
      if (its.streams[i]->device != device) continue;
      const cudaError_t error = its.wait_for(lock, its.streams[i]->last);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  return call("cudaStreamIsCapturing", [&](Machine& its, auto&) {
    CUstream_st* stream = stream_of(its, handle, "cudaStreamIsCapturing");
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    // "while a blocking stream on the same device is capturing, it will return
    // cudaErrorStreamCaptureImplicit" for the null stream (:2603-2606).
    if (unusable(its, stream)) return cudaErrorStreamCaptureImplicit;
    *status = stream->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t event_handle, unsigned) {
  return call("cudaStreamWaitEvent", [&](Machine& its, auto&) {
    CUstream_st* stream = stream_of(its, stream_handle, "cudaStreamWaitEvent");
    const CUevent_st* event = event_of(its, event_handle, "cudaStreamWaitEvent");
    if (event == nullptr) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = open_for_work(stream); error != cudaSuccess) return error;
    // "use the most recently captured state at the time of the API call" (:2811-2814). An event
    // that was never recorded makes nobody wait: no program means that.
    if (!event->recorded) {
      its.find("cudaStreamWaitEvent: the event was never recorded, so the stream does not wait");
      return cudaSuccess;
    }
    if (its.options.mischief == Mischief::kNoWaits) return cudaSuccess;
    its.submit(stream, {.what = fmt::format("a wait for stream {}", event->recorded->stream->actor),
                        .duration_ns = kMarkNs,
                        .after = {event->recorded}});
    return cudaSuccess;
  });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return call("cudaEventCreateWithFlags", [&](Machine& its, auto&) {
    constexpr unsigned kKnown = cudaEventBlockingSync | cudaEventDisableTiming;
    if ((flags & ~kKnown) != 0) return cudaErrorInvalidValue;
    static_cast<void>(current(its));
    auto created = std::make_unique<CUevent_st>();
    created->device = current_device();
    created->flags = flags;
    *event = created.get();
    its.events.emplace(*event, std::move(created));
    return cudaSuccess;
  });
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

// "An event may be destroyed before it is complete" (:2958-2961).
cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  return call("cudaEventDestroy", [&](Machine& its, auto&) {
    CUevent_st* event = event_of(its, handle, "cudaEventDestroy");
    if (event == nullptr) return cudaErrorInvalidResourceHandle;
    event->destroyed = true;
    event->recorded = nullptr;
    return cudaSuccess;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t event_handle, cudaStream_t stream_handle) {
  return call("cudaEventRecord", [&](Machine& its, auto&) {
    CUstream_st* stream = stream_of(its, stream_handle, "cudaEventRecord");
    CUevent_st* event = event_of(its, event_handle, "cudaEventRecord");
    if (event == nullptr) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = open_for_work(stream); error != cudaSuccess) return error;
    // "event and stream must be on the same CUDA context" (:2804).
    if (event->device != stream->device) {
      return refuse(its, cudaErrorInvalidResourceHandle,
                    "cudaEventRecord: an event of device {} on a stream of device {}",
                    event->device, stream->device);
    }
    its.submit(stream, {.what = "an event's record", .duration_ns = kMarkNs});
    event->recorded = its.last_of(stream);
    return cudaSuccess;
  });
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  return call("cudaEventQuery", [&](Machine& its, Machine::Lock& lock) {
    const CUevent_st* event = event_of(its, handle, "cudaEventQuery");
    if (event == nullptr) return cudaErrorInvalidResourceHandle;
    return its.query(lock, event->recorded);
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  return call("cudaEventSynchronize", [&](Machine& its, Machine::Lock& lock) {
    const CUevent_st* event = event_of(its, handle, "cudaEventSynchronize");
    if (event == nullptr) return cudaErrorInvalidResourceHandle;
    const OperationRef recorded = event->recorded;  // the event may be recorded again meanwhile
    return its.wait_for(lock, recorded);
  });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* user_data) {
  return call("cudaLaunchHostFunc", [&](Machine& its, auto&) {
    CUstream_st* stream = stream_of(its, handle, "cudaLaunchHostFunc");
    if (const cudaError_t error = open_for_work(stream); error != cudaSuccess) return error;
    its.submit(stream, {.what = "a host function",
                        .duration_ns = kHostFunctionNs,
                        .on_host = [=](cudaError_t) { function(user_data); }});
    return cudaSuccess;
  });
}

// "For each cudaStreamAddCallback call, a callback will be executed exactly once", with an error
// "in the event of a device error" (:2242-2247).
cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t callback,
                                  void* user_data, unsigned flags) {
  return call("cudaStreamAddCallback", [&](Machine& its, auto&) {
    CUstream_st* stream = stream_of(its, handle, "cudaStreamAddCallback");
    if (const cudaError_t error = open_for_work(stream); error != cudaSuccess) return error;
    if (flags != 0) return cudaErrorInvalidValue;
    its.submit(stream, {.what = "a callback",
                        .duration_ns = kHostFunctionNs,
                        .on_host = [=](cudaError_t error) { callback(handle, error, user_data); },
                        .on_host_after_error = true});
    return cudaSuccess;
  });
}
