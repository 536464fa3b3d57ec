// SPDX-License-Identifier: Apache-2.0
// base/topology/gpu_memory.h: asks NVIDIA's management library how much memory of a GPU is free.
// Unlike CUDA, that library makes no context on the GPU.
//
// The library is part of the driver and is opened at run time, so nothing is linked.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace ziggurat {

class GpuMemoryReader {
 public:
  /// Opens the library. If it is missing or does not start, free_bytes() returns nothing.
  explicit GpuMemoryReader(const std::string& library = "libnvidia-ml.so.1");
  ~GpuMemoryReader();
  GpuMemoryReader(const GpuMemoryReader&) = delete;
  GpuMemoryReader& operator=(const GpuMemoryReader&) = delete;

  /// Returns the free bytes of the GPU at a PCI address, "0000:3b:00.0". Nothing if unknown.
  std::optional<std::uint64_t> free_bytes(const std::string& pci_address) const;

 private:
  struct Library;
  std::unique_ptr<Library> library_;
};

}  // namespace ziggurat
