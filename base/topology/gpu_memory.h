// SPDX-License-Identifier: Apache-2.0
// base/topology/gpu_memory.h: how much memory of a GPU is free, asked of NVIDIA's management
// library, which makes no context on the GPU as CUDA would.
//
// The library is part of the driver and is opened at run time: nothing is linked.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace ziggurat {

class GpuMemoryReader {
 public:
  /// A library that is not there, or does not start, answers nothing to every question.
  explicit GpuMemoryReader(const std::string& library = "libnvidia-ml.so.1");
  ~GpuMemoryReader();
  GpuMemoryReader(const GpuMemoryReader&) = delete;
  GpuMemoryReader& operator=(const GpuMemoryReader&) = delete;

  /// At a GPU's PCI address, "0000:3b:00.0". Nothing: unknown.
  std::optional<std::uint64_t> free_bytes(const std::string& pci_address) const;

 private:
  struct Library;
  std::unique_ptr<Library> library_;
};

}  // namespace ziggurat
