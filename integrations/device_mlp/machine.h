// SPDX-License-Identifier: Apache-2.0
// integrations/device_mlp/machine.h: who runs the layers: the CPU over an emulated device, or a GPU
// on a stream of the trainer's own. The trainer is the same.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/device_span.h"
#include "integrations/device_mlp/layers.h"
#include "tiers/cuda_device.h"
#include "tiers/host_device.h"

namespace ziggurat::device_mlp {

class Machine {
 public:
  virtual ~Machine() = default;
  /// These queue, in order. Errors: as the device's.
  virtual void run(const Each<Embed>& program) = 0;
  virtual void run(const Each<Linear>& program) = 0;
  virtual void run(const Each<Softmax>& program) = 0;
  virtual void run(const Each<LinearGradient>& program) = 0;
  virtual void run(const Each<LinearBackward>& program) = 0;
  virtual void run(const Each<EmbedGradient>& program) = 0;
  /// Where they queue: the engine's calls order its copies with them by it.
  virtual StreamRef& stream() = 0;
  /// What was queued is done before these, and they are when they return.
  virtual void write(DeviceSpan<std::byte> to, std::span<const std::byte> bytes) = 0;
  virtual void read(std::span<std::byte> to, DeviceSpan<const std::byte> bytes) = 0;
};

/// On the calling thread.
std::unique_ptr<Machine> make_machine(HostDevice& device);
/// On a stream of its own, of the GPU that becomes the thread's current one; `bytes_max`: of a
/// write() or read(). Errors: kUnimplemented in a build
/// without CUDA.
std::unique_ptr<Machine> make_machine(CudaDevice& device, std::uint64_t bytes_max);

}  // namespace ziggurat::device_mlp
