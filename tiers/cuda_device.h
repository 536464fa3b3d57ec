// SPDX-License-Identifier: Apache-2.0
// tiers/cuda_device.h: an NVIDIA GPU as the device, by the CUDA runtime, which is linked
// statically: a build with it starts on machines without a driver, and says so. A build without it
// has the same functions (cuda_device_absent.cc).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/runtime/metrics.h"
#include "base/runtime/reactor.h"
#include "base/runtime/trace.h"
#include "tiers/device.h"

namespace ziggurat {

/// What `ziggurat doctor` shows.
struct CudaInventory {
  struct Gpu {
    int index = 0;
    std::string name;
    std::string pci_bus_id;  ///< "0000:3b:00.0", as the kernel names it
    std::uint64_t memory_bytes = 0;
    std::uint64_t free_bytes = 0;
  };
  std::vector<Gpu> gpus;
  std::string driver_version;   ///< newest CUDA the driver can do, "12.4"; empty: no driver
  std::string runtime_version;  ///< the CUDA we were built with; empty: built without
  std::string why_none;         ///< empty if there are GPUs
};

/// Never throws for want of a GPU.
CudaInventory cuda_devices();

struct CudaDeviceOptions {
  int index = 0;                     ///< as CUDA counts (CUDA_VISIBLE_DEVICES applies)
  std::uint64_t capacity_bytes = 0;  ///< the budget: taken at creation, all of it
  Trace* trace = nullptr;
  Metrics* metrics = nullptr;
};

class CudaDevice : public Device {
 public:
  /// The reactor must outlive the device.
  /// Errors: kUnavailable "no CUDA device: <why>"; kInvalidArgument for an index or budget that
  /// cannot be; kResourceExhausted if the GPU has no such memory free.
  static std::unique_ptr<CudaDevice> create(Reactor& reactor, const CudaDeviceOptions& options);

  bool host_accessible() const noexcept final { return false; }

  /// Queues `action` on a stream of this device, in order, on a thread of the driver's: it must not
  /// call CUDA, nor throw.
  virtual void enqueue(Stream& stream, std::function<void()> action) = 0;
};

}  // namespace ziggurat
