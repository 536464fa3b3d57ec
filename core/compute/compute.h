// SPDX-License-Identifier: Apache-2.0
// core/compute/compute.h: operations on bytes that lie in a device's memory. They are done by the
// CPU's workers for memory that the CPU may touch (cpu_compute.h), and by kernels on a stream of a
// GPU (cuda_compute.h). Both give the same bits.
//
// An operation begins when it is awaited. It returns when it has finished, or it returns the event
// of its end. Until then nothing else may use the bytes that it reads and writes. Operations of one
// Compute may overlap: a caller that needs an order awaits the first before it begins the second.
// Spans in device memory belong to the Compute's device. All calls are made on the reactor's
// thread.
//
// Every operation fails with kUnavailable when the device is lost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/device_span.h"
#include "base/runtime/reactor.h"
#include "base/runtime/workers.h"
#include "collectives/quantize/quantized_block.h"
#include "optimizer/update.h"
#include "tiers/device/device.h"

namespace ziggurat {

/// The buffer's memory.
inline DeviceSpan<std::byte> device_span(const DeviceBuffer& buffer) noexcept {
  return {reinterpret_cast<std::uintptr_t>(buffer.data()), buffer.size_bytes()};
}

class Compute {
 public:
  virtual ~Compute() = default;

  /// Returns the same memory as the CPU sees it; empty if the CPU may not touch it.
  virtual std::span<std::byte> host_view(DeviceSpan<std::byte> bytes) const noexcept = 0;

  /// Makes operations that begin after this call has returned run after `event`. A GPU's stream
  /// waits for the event in their place, so this call returns at once.
  virtual Task<> after(const Event& event) = 0;

  /// Sets every byte to zero; `bytes` are written once. Returns an event that happens when they are
  /// zero. Work on another stream must wait for that event.
  virtual Task<Event> clear(DeviceSpan<std::byte> bytes) = 0;

  /// Whole tiles (kTileElements) of a gradient, each to be rounded as round_gradient() does.
  struct Rounding {
    DeviceSpan<const float> values;
    TypedDeviceSpan<std::byte> out;  ///< may begin at the same address as `values`
    /// Out, in host memory: the sum of squares of each tile; empty if no sums are wanted, as with
    /// several rows.
    std::span<double> squares;
    /// `values` and `out` are the first of so many rows, which begin `stride_bytes` from each
    /// other.
    std::uint64_t rows = 1;
    std::uint64_t stride_bytes = 0;

    Rounding row(std::uint64_t index) const noexcept {
      const std::uint64_t offset_bytes = index * stride_bytes;
      return {.values = {values.address() + offset_bytes, values.size()},
              .out = {out.dtype, {out.bytes.address() + offset_bytes, out.bytes.size()}},
              .squares = squares};
    }
  };
  /// Rounds a gradient. Reads 4 bytes per element and writes the size of the rounded type.
  virtual Task<> round(const Rounding& rounding) = 0;

  /// Blocks of a gradient to be coded in 8 or 4 bits, as quantize() does.
  struct Quantizing {
    DeviceSpan<const float> values;
    QuantizedBits bits = QuantizedBits::k8;
    std::span<std::byte> codes;  ///< out: quantized_bytes() bytes of host memory
  };
  /// Quantizes a gradient. Reads 4 bytes per element; 1.02 bytes (8 bits) or 0.52 bytes (4 bits)
  /// per element cross the link to the host. May be called only if ComputeLimits::quantizes is set.
  virtual Task<> quantize(const Quantizing& quantizing) = 0;

  /// A record with its gradient and parameter, as in RecordView.
  struct Update {
    StepView steps;
    StateFormat format = StateFormat::kFp32;
    DeviceSpan<std::byte> record{};
    TypedDeviceSpan<const std::byte> grad{};
    TypedDeviceSpan<std::byte> param{};
    std::uint64_t first_element = 0;
    std::span<const DecayRun> runs{};
  };
  /// Makes one optimizer step as update_record() does, but takes no hash. Reads and writes the
  /// record, reads the gradient and writes the parameter: 28 bytes per element for AdamW in fp32.
  virtual Task<> update(const Update& update) = 0;
};

/// The limits by which a GPU sets memory aside when its Compute is made.
struct ComputeLimits {
  std::uint64_t round_count_max = 0;  ///< elements of the longest span that round() is given
  bool quantizes = false;             ///< quantize() is called
};

/// Makes the Compute that fits `device`. All arguments but `limits` must outlive it. Errors:
/// kUnimplemented for a device for which this build has no kernels; kResourceExhausted.
std::unique_ptr<Compute> make_compute(Device& device, Reactor& reactor, Workers& workers,
                                      const ComputeLimits& limits);

}  // namespace ziggurat
