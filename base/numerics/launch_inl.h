// SPDX-License-Identifier: Apache-2.0
// base/numerics/launch_inl.h: runs a block program (block_program.h) as a CUDA kernel. For .cu
// files only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "base/numerics/block_program.h"
#include "base/numerics/kernel_launch.h"

namespace ziggurat::internal {

template <int kPhase, class Program>
__device__ __forceinline__ void run_on_device(const Program& program,
                                              typename Program::Shared& shared, Place at) {
  program.run(Phase<kPhase>(), shared, at);
  if constexpr (kPhase + 1 < Program::kPhases) {
    __syncthreads();
    run_on_device<kPhase + 1>(program, shared, at);
  }
}

/// Runs a program. __grid_constant__ makes threads read the arguments where they were passed,
/// instead of copying them to each thread.
template <class Program>
__global__ void __launch_bounds__(Program::kThreads)
    run_program(const __grid_constant__ Program program) {
  __shared__ typename Program::Shared shared;
  run_on_device<0>(program, shared, Place{blockIdx.x, threadIdx.x});
}

inline FailedCall failed_call(cudaError_t error) {
  int device = -1;
  if (cudaGetDevice(&device) != cudaSuccess)
    device = -1;  // the call's own error is what the
                  // caller needs to know
  return {
      .device = device,
      .error = static_cast<int>(error),
      .out_of_memory = error == cudaErrorMemoryAllocation || error == cudaErrorLaunchOutOfResources,
      .error_name = cudaGetErrorName(error),
      .error_text = cudaGetErrorString(error)};
}

/// Throws if `call`, which works on `size_bytes` of memory, failed.
inline void require_success(const char* call, std::uint64_t size_bytes, cudaError_t error) {
  if (error != cudaSuccess) call_failed(call, size_bytes, failed_call(error));
}

/// Queues the program; does nothing if it has no blocks. `name` is for the error.
template <class Program>
void launch_program(const char* name, const Program& program, StreamHandle stream) {
  constexpr std::size_t kArgumentBytesMax = 4096;  // the most that every architecture accepts
  static_assert(sizeof(Program) <= kArgumentBytesMax);
  const std::uint64_t blocks = program.blocks();
  if (blocks == 0) return;
  require_launchable(name, blocks);
  Program arguments = program;
  void* pointers[] = {&arguments};
  const cudaError_t error = cudaLaunchKernel(
      reinterpret_cast<const void*>(&run_program<Program>), dim3(static_cast<unsigned>(blocks)),
      dim3(Program::kThreads), pointers, 0, static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) launch_failed(name, blocks, Program::kThreads, failed_call(error));
}

}  // namespace ziggurat::internal
