// SPDX-License-Identifier: Apache-2.0
// tests/collectives/nccl/double/cuda_hooks.h: what the double of NCCL, a shared library, needs of
// the double of CUDA, which is part of the program that opens it.
//
// A real NCCL has a CUDA runtime of its own and meets the program's in the driver. The double meets
// the program's runtime through the one symbol below.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace ziggurat::nccl_double {

struct CudaHooks {
  cudaError_t (*get_device)(int* device);
  cudaError_t (*pci_bus_id)(char* text, int size, int device);
  cudaError_t (*pointer_attributes)(cudaPointerAttributes* attributes, const void* address);
  /// The next work on the stream waits until `work` returns.
  cudaError_t (*launch)(cudaStream_t stream, cudaHostFn_t work, void* data);
  /// Where the CPU may touch memory of a device; null unless one allocation holds all of it.
  std::byte* (*device_bytes)(const void* address, std::size_t size_bytes);
  /// The device of a stream; -1: no stream.
  int (*device_of_stream)(cudaStream_t stream);
};

using GetCudaHooks = const CudaHooks* (*)();
inline constexpr const char* kCudaHooksSymbol = "ziggurat_nccl_double_cuda_hooks";

}  // namespace ziggurat::nccl_double
