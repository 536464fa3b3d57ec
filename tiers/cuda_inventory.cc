// SPDX-License-Identifier: Apache-2.0
// tiers/cuda_inventory.cc: lists the GPUs of CUDA by calls that make no context.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <utility>

#include "base/topology/gpu_memory.h"
#include "tiers/cuda_context.h"
#include "tiers/cuda_device.h"

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

}  // namespace

CudaInventory cuda_devices() {
  CudaInventory inventory;
  inventory.runtime_version = version_text(CUDART_VERSION);
  int driver = 0;
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver > 0) {
    inventory.driver_version = version_text(driver);
  }
  int count = 0;
  if (const cudaError_t result = cudaGetDeviceCount(&count); result != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    inventory.why_none = cuda_text(result);
    return inventory;
  }
  if (count == 0) inventory.why_none = "the driver lists no GPU";
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
