// SPDX-License-Identifier: Apache-2.0
// tiers/device/cuda_device.h: an NVIDIA GPU as the device, through the CUDA runtime. The runtime is
// linked statically, so a build with CUDA starts on machines without a driver, and says so. A build
// without CUDA has the same functions (cuda_device_absent.cc).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/runtime/metrics.h"
#include "base/runtime/reactor.h"
#include "base/runtime/trace.h"
#include "tiers/device/device.h"
#include "tiers/device/driver_watch.h"

namespace ziggurat {

/// What `ziggurat doctor` shows of CUDA.
struct CudaInventory {
  struct Gpu {
    int index = 0;
    std::string name;
    std::string pci_bus_id;  ///< "0000:3b:00.0", as the kernel names it
    std::uint64_t memory_bytes = 0;
    std::optional<std::uint64_t> free_bytes;  ///< set if NVIDIA's management library tells it
  };
  std::vector<Gpu> gpus;
  std::string driver_version;   ///< newest CUDA that the driver supports, "12.4"; empty if there is
                                ///< no driver
  std::string runtime_version;  ///< the CUDA with which this program was built; empty if it was
                                ///< built without
  std::string why_none;         ///< empty if there are GPUs
};

/// Lists the GPUs. Does not throw if there are none. Makes no context, because that would take
/// hundreds of MiB on each GPU, also on those of other jobs.
CudaInventory cuda_devices();

struct CudaDeviceOptions {
  int index = 0;                     ///< CUDA's number of the GPU (CUDA_VISIBLE_DEVICES applies)
  std::uint64_t capacity_bytes = 0;  ///< the budget, all of it taken at creation
  /// Memory of the GPU to use instead of a block of the device's own: `capacity_bytes` at this
  /// address, which 256 divides, and which nothing else uses while the device lives. Null if there
  /// is none.
  void* lent_memory = nullptr;
  DriverDeadlines deadlines = {};
  Trace* trace = nullptr;
  Metrics* metrics = nullptr;
};

class CudaContext;

/// A GPU. Its memory is one block of a pool of its own, taken and given back in the order of a
/// stream: cudaMalloc and cudaFree would wait for all work of the process on the GPU, and a
/// collective that spins for another rank may never end that wait.
///
/// Loss of the GPU is final (cuda_context.h). Each copy and each event under way then fails once,
/// with an error that names the device and the call. No CUDA call is made any more, and memory to
/// which the GPU may still write is neither freed nor unregistered.
class CudaDevice : public Device {
 public:
  /// Makes a device; the reactor must outlive it. Errors: kUnavailable "no CUDA device can be used:
  /// <why>"; kInvalidArgument for an index or a budget that is not possible, or for lent memory
  /// that is not aligned or not the GPU's; kResourceExhausted if the GPU has less free memory;
  /// kUnimplemented for a GPU without memory pools.
  static std::unique_ptr<CudaDevice> create(Reactor& reactor, const CudaDeviceOptions& options);

  bool host_accessible() const noexcept final { return false; }

  /// Wraps a stream of the caller, given by the driver's handle (cudaStream_t; PyTorch:
  /// `stream.cuda_stream`). Used on any thread. Its events may be awaited on the reactor. The
  /// caller drops the result before it destroys the stream; that waits for the events that the
  /// result has recorded. record() and wait() refuse a stream that captures a graph
  /// (kInvalidArgument).
  ///
  /// Null is the legacy default stream, like cudaStreamLegacy, even in a program that was compiled
  /// with per-thread default streams. The device's own streams are non-blocking, so they and the
  /// caller's wait for each other by events alone. cudaStreamPerThread is the stream of the thread
  /// that calls record() or wait(): a trainer that uses it must make these calls on the thread that
  /// queues its work ("Stream synchronization behavior" in the CUDA runtime's manual).
  virtual std::unique_ptr<StreamRef> caller_stream(void* handle) = 0;

  /// Returns the object that makes every CUDA call, for code that launches kernels on this device's
  /// streams.
  virtual CudaContext& context() noexcept = 0;
};

}  // namespace ziggurat
