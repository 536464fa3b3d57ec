// SPDX-License-Identifier: Apache-2.0
// integrations/device_mlp/machine.h: what runs the layers: the CPU over an emulated device, or a
// GPU on a stream of the trainer's own. The trainer is the same for both.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/device_span.h"
#include "integrations/device_mlp/layers.h"
#include "tiers/device/cuda_device.h"
#include "tiers/device/host_device.h"

namespace ziggurat::device_mlp {

class Machine {
 public:
  virtual ~Machine() = default;
  /// The functions run() queue layers in order. Errors: the device's.
  virtual void run(const Each<Embed>& program) = 0;
  virtual void run(const Each<Linear>& program) = 0;
  virtual void run(const Each<Softmax>& program) = 0;
  virtual void run(const Each<LinearGradient>& program) = 0;
  virtual void run(const Each<LinearBackward>& program) = 0;
  virtual void run(const Each<EmbedGradient>& program) = 0;
  /// Returns the stream on which run() queues; the engine orders its copies with the layers by it.
  virtual StreamRef& stream() = 0;
  /// Wait for everything that was queued, copy, and return when the copy is done.
  virtual void write(DeviceSpan<std::byte> to, std::span<const std::byte> bytes) = 0;
  virtual void read(std::span<std::byte> to, DeviceSpan<const std::byte> bytes) = 0;
};

/// Returns a machine that runs layers on the calling thread.
std::unique_ptr<Machine> make_machine(HostDevice& device);
/// Returns a machine with a stream of its own on the device's GPU, which becomes the thread's
/// current one. `bytes_max` is the most that a write() or read() copies. Errors: kUnimplemented in
/// a build without CUDA.
std::unique_ptr<Machine> make_machine(CudaDevice& device, std::uint64_t bytes_max);

}  // namespace ziggurat::device_mlp
