// SPDX-License-Identifier: Apache-2.0
// tests/collectives/nccl/double/cuda_machine.cc: what the double of NCCL gets from that of CUDA.
#include "tests/collectives/nccl/double/cuda_machine.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "base/error.h"
#include "tests/collectives/nccl/double/cuda_hooks.h"
#include "tests/cuda_double/cuda_double.h"

namespace ziggurat::nccl_double {
namespace {

std::byte* bytes_of(const void* address, std::size_t size_bytes) {
  try {
    return cuda_double::device_bytes(address, size_bytes);
  } catch (const Error&) {
    return nullptr;
  }
}

int device_of(cudaStream_t stream) {
  int device = -1;
  return cudaStreamGetDevice(stream, &device) == cudaSuccess ? device : -1;
}

const bool kStarted = [] {
  if (std::getenv("ZIGGURAT_DOUBLE_GPUS") != nullptr) start_cuda_machine();
  return true;
}();

}  // namespace

void start_cuda_machine() {
  const char* const list = std::getenv("ZIGGURAT_DOUBLE_GPUS");
  const std::string gpus = list != nullptr ? list : "0";
  const auto count = static_cast<int>(std::ranges::count(gpus, ',')) + 1;
  cuda_double::reset(17, {.devices = count, .first_gpu = std::stoi(gpus)});
}

}  // namespace ziggurat::nccl_double

using ziggurat::nccl_double::CudaHooks;

extern "C" __attribute__((visibility("default"))) const CudaHooks*
ziggurat_nccl_double_cuda_hooks() {
  static const CudaHooks hooks{.get_device = [](int* device) { return cudaGetDevice(device); },
                               .pci_bus_id = cudaDeviceGetPCIBusId,
                               .pointer_attributes = cudaPointerGetAttributes,
                               .launch = cudaLaunchHostFunc,
                               .device_bytes = ziggurat::nccl_double::bytes_of,
                               .device_of_stream = ziggurat::nccl_double::device_of};
  return &hooks;
}
