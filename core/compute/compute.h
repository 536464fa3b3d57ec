// SPDX-License-Identifier: Apache-2.0
// core/compute/compute.h: what is done to bytes where they lie: by the CPU's workers in memory that
// it may touch (cpu_compute.h), by kernels on a stream of a GPU (cuda_compute.h). The same bits.
//
// An operation begins when it is awaited and returns when it has finished, or gives the event of
// its end; what it reads and writes is its own until then. Operations of one Compute may overlap:
// who needs an order awaits. Spans in device memory are of the Compute's device. Reactor's thread.
//
// Errors of all: kUnavailable when the device is lost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/device_span.h"
#include "base/runtime/reactor.h"
#include "base/runtime/worker_pool.h"
#include "collectives/quantize/quantized_block.h"
#include "optimizer/update.h"
#include "tiers/device.h"

namespace ziggurat {

/// The buffer's memory.
inline DeviceSpan<std::byte> device_span(const DeviceBuffer& buffer) noexcept {
  return {reinterpret_cast<std::uintptr_t>(buffer.data()), buffer.size_bytes()};
}

class Compute {
 public:
  virtual ~Compute() = default;

  /// The same memory for the CPU; empty where the CPU may not touch it.
  virtual std::span<std::byte> host_view(DeviceSpan<std::byte> bytes) const noexcept = 0;

  /// Operations that begin when this has returned come after `event`: a GPU waits for it in their
  /// place, and this returns at once.
  virtual Task<> after(const Event& event) = 0;

  /// Every byte is zero once the event has happened: it returns when this is certain to come. What
  /// is queued on another stream waits for the event. Writes `bytes` once.
  virtual Task<Event> clear(DeviceSpan<std::byte> bytes) = 0;

  /// Whole tiles of a gradient (kTileElements), each rounded as round_gradient() does.
  struct Rounding {
    DeviceSpan<const float> values;
    TypedDeviceSpan<std::byte> out;  ///< may begin where `values` do
    std::span<double> squares;       ///< out: of each tile, in host memory; empty: not wanted
  };
  /// Reads 4 bytes an element, writes its rounded size.
  virtual Task<> round(const Rounding& rounding) = 0;

  /// Blocks of a gradient in 8 or 4 bits, as quantize() makes them.
  struct Quantizing {
    DeviceSpan<const float> values;
    QuantizedBits bits = QuantizedBits::k8;
    std::span<std::byte> codes;  ///< out: quantized_bytes() of host memory
  };
  /// Reads 4 bytes an element; 1.02 or 0.52 cross the link. Only where ComputeLimits has it.
  virtual Task<> quantize(const Quantizing& quantizing) = 0;

  /// A record and what goes with it, as in RecordView.
  struct Update {
    StepView steps;
    StateFormat format = StateFormat::kFp32;
    DeviceSpan<std::byte> record{};
    TypedDeviceSpan<const std::byte> grad{};
    TypedDeviceSpan<std::byte> param{};
    std::uint64_t first_element = 0;
    std::span<const DecayRun> runs{};
  };
  /// One optimizer step, as update_record() makes it; no hash is taken. Reads and writes the
  /// record, reads the gradient, writes the parameter: 28 bytes an element of AdamW in fp32.
  virtual Task<> update(const Update& update) = 0;
};

/// What a GPU gives some memory for.
struct ComputeLimits {
  std::uint64_t round_count_max = 0;  ///< elements of the longest span that is rounded
  bool quantizes = false;             ///< gradients
};

/// That of `device`. All must outlive it. Errors: kUnimplemented for a device that this build has
/// no kernels for; kResourceExhausted.
std::unique_ptr<Compute> make_compute(Device& device, Reactor& reactor, WorkerPool& workers,
                                      const ComputeLimits& limits);

}  // namespace ziggurat
