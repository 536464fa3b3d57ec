// SPDX-License-Identifier: Apache-2.0
// tiers/cuda_device.h: an NVIDIA GPU as the device, by the CUDA runtime, which is linked
// statically: a build with it starts on machines without a driver, and says so. A build without it
// has the same functions (cuda_device_absent.cc).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/runtime/metrics.h"
#include "base/runtime/reactor.h"
#include "base/runtime/trace.h"
#include "tiers/device.h"
#include "tiers/driver_watch.h"

namespace ziggurat {

/// What `ziggurat doctor` shows.
struct CudaInventory {
  struct Gpu {
    int index = 0;
    std::string name;
    std::string pci_bus_id;  ///< "0000:3b:00.0", as the kernel names it
    std::uint64_t memory_bytes = 0;
    std::optional<std::uint64_t> free_bytes;  ///< where NVIDIA's management library tells
  };
  std::vector<Gpu> gpus;
  std::string driver_version;   ///< newest CUDA the driver can do, "12.4"; empty: no driver
  std::string runtime_version;  ///< the CUDA we were built with; empty: built without
  std::string why_none;         ///< empty if there are GPUs
};

/// Never throws for want of a GPU. Makes no context: that would take hundreds of MiB on each GPU,
/// those of other jobs included.
CudaInventory cuda_devices();

struct CudaDeviceOptions {
  int index = 0;                     ///< as CUDA counts (CUDA_VISIBLE_DEVICES applies)
  std::uint64_t capacity_bytes = 0;  ///< the budget: taken at creation, all of it
  /// Memory of the GPU to use in place of the device's own: `capacity_bytes` at this address, which
  /// nobody else touches while the device lives. Null: none.
  void* lent_memory = nullptr;
  DriverDeadlines deadlines = {};
  Trace* trace = nullptr;
  Metrics* metrics = nullptr;
};

class CudaContext;

/// Its memory is one block of a pool of its own, taken and given back in the order of a stream:
/// cudaMalloc and cudaFree would wait for everything that the process does on the GPU, and a
/// collective that spins for another rank may never end that wait.
///
/// Loss of the GPU is final (cuda_context.h): each copy and each event under way fails once, with
/// an error that names the device and the call; nothing is called any more, and what the GPU may
/// still write to is neither freed nor unregistered.
class CudaDevice : public Device {
 public:
  /// The reactor must outlive the device.
  /// Errors: kUnavailable "no CUDA device: <why>"; kInvalidArgument for an index or budget that
  /// cannot be; kResourceExhausted if the GPU has no such memory free; kUnimplemented for a GPU
  /// without memory pools.
  static std::unique_ptr<CudaDevice> create(Reactor& reactor, const CudaDeviceOptions& options);

  bool host_accessible() const noexcept final { return false; }

  /// A stream of the caller's, by the driver's handle (cudaStream_t; PyTorch:
  /// `stream.cuda_stream`). Used on any thread. Its events may be awaited on the reactor; dropping
  /// the result waits for those that it recorded, and comes before the stream is destroyed.
  /// record() and wait() refuse a stream that captures a graph (kInvalidArgument).
  ///
  /// Null is the legacy default stream, as cudaStreamLegacy, also in a program that was compiled
  /// with per-thread default streams. The device's own streams are non-blocking, so it and they
  /// wait for each other by events alone. cudaStreamPerThread is the stream of the thread that
  /// calls record() or wait(): calls of a trainer that uses it are made on the thread that queues
  /// its work ("Stream synchronization behavior" in the CUDA runtime's manual).
  virtual std::unique_ptr<StreamRef> caller_stream(void* handle) = 0;

  /// What makes every CUDA call, for those who launch kernels on this device's streams.
  virtual CudaContext& context() noexcept = 0;
};

}  // namespace ziggurat
