// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/api.h: what every function of the runtime does first and last.
#pragma once

#include <cuda_runtime_api.h>

#include <fmt/format.h>

#include <string_view>
#include <utility>

#include "tests/cuda_double/machine.h"

namespace ziggurat::cuda_double {

/// The device that calls of this thread mean (cudaSetDevice: "per-thread").
int& current_device() noexcept;
DeviceState& current(Machine& its);

/// Whether the call may go on: counts it, and answers with injected and sticky errors.
cudaError_t admit(Machine& its, const char* name);
/// Keeps the error for cudaGetLastError of this thread.
cudaError_t remember(const Machine& its, cudaError_t error) noexcept;
cudaError_t last_error_of_thread(bool take);

/// A call of the runtime: `body(machine, lock)` if nothing speaks against it.
template <class Body>
cudaError_t call(const char* name, Body&& body) {
  Machine& its = machine();
  Machine::Lock lock(its.mutex);
  cudaError_t error = admit(its, name);
  if (error == cudaSuccess) error = std::forward<Body>(body)(its, lock);
  return remember(its, error);
}

/// A finding, and the error that the caller gets.
template <class... Args>
cudaError_t refuse(Machine& its, cudaError_t error, fmt::format_string<Args...> text,
                   Args&&... args) {
  its.find(fmt::format(text, std::forward<Args>(args)...));
  return error;
}

/// The stream of a handle (0 and cudaStreamLegacy: the null stream); null, with a finding, if there
/// is none, or it was destroyed.
CUstream_st* stream_of(Machine& its, cudaStream_t handle, const char* name);
CUevent_st* event_of(Machine& its, cudaEvent_t handle, const char* name);
/// The error of work on a stream that is invalid or captures; cudaSuccess: go on.
cudaError_t open_for_work(CUstream_st* stream) noexcept;

}  // namespace ziggurat::cuda_double
