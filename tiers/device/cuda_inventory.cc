// SPDX-License-Identifier: Apache-2.0
// tiers/device/cuda_inventory.cc: lists the GPUs of CUDA by calls that make no context.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <utility>

#include "base/topology/gpu_memory.h"
#include "tiers/device/cuda_context.h"
#include "tiers/device/cuda_device.h"

namespace ziggurat {
namespace {

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

std::string bus_id(int index) {
  char text[32] = {};
  if (cudaDeviceGetPCIBusId(text, sizeof(text), index) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return "?";
  }
  std::string id(text);
  for (char& c : id) {
    if (c >= 'A' && c <= 'F') c = static_cast<char>(c - 'A' + 'a');
  }
  return id;
}

/// NVIDIA's first driver for the CUDA that this was built with ("CUDA Toolkit and Minimum Required
/// Driver Version for CUDA Minor Version Compatibility", CUDA's release notes).
constexpr const char* kFirstDriver = CUDART_VERSION / 1000 == 13   ? "580"
                                     : CUDART_VERSION / 1000 == 12 ? "525"
                                                                   : nullptr;
static_assert(kFirstDriver != nullptr, "add the first driver of this CUDA");

}  // namespace

std::string driver_version() {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return "";
  return version_text(driver);
}

std::string why_no_gpu(cudaError_t error) {
  if (error == cudaSuccess) return "the driver lists no GPU";
  if (error != cudaErrorInsufficientDriver) return cuda_text(error);
  const std::string driver = driver_version();
  const std::string found = driver.empty() ? "there is no NVIDIA driver"
                                           : fmt::format("the driver is for CUDA {}", driver);
  return fmt::format("{}, and CUDA {} needs driver {} or later: install it", found,
                     version_text(CUDART_VERSION), kFirstDriver);
}

CudaInventory cuda_devices() {
  CudaInventory inventory;
  inventory.runtime_version = version_text(CUDART_VERSION);
  inventory.driver_version = driver_version();
  int count = 0;
  if (const cudaError_t result = cudaGetDeviceCount(&count); result != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    inventory.why_none = why_no_gpu(result);
    return inventory;
  }
  if (count == 0) inventory.why_none = why_no_gpu(cudaSuccess);
  const GpuMemoryReader memory;
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      continue;
    }
    const std::string address = bus_id(index);
    inventory.gpus.push_back({.index = index,
                              .name = properties.name,
                              .pci_bus_id = address,
                              .memory_bytes = properties.totalGlobalMem,
                              .free_bytes = memory.free_bytes(address)});
  }
  if (inventory.gpus.empty() && inventory.why_none.empty()) {
    inventory.why_none =
        "no GPU answers: another process may use it exclusively, or it may have fallen off the bus";
  }
  return inventory;
}

}  // namespace ziggurat
