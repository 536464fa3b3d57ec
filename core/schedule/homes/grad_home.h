// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes/grad_home.h: where gradients live between backward and the update, one class
// for each tier: rounded to the model's type, or as the trainer lent them. Only these classes know
// the tier; make_grad_home.cc chooses among them. Reactor's thread only.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/typed_span.h"
#include "core/schedule/context.h"
#include "tiers/store/swap_file.h"

namespace ziggurat {

class GradSums;

/// What an update needs of a home.
class GradHome {
 public:
  /// Makes the home of gradients that the trainer lends (Context::lent), or sums in `sums`, which
  /// may be null.
  static std::unique_ptr<GradHome> create_lent(Context& context, GradSums* sums);
  virtual ~GradHome() = default;
  GradHome(const GradHome&) = delete;
  GradHome& operator=(const GradHome&) = delete;

  virtual std::uint64_t item_bytes(const Chunk&) const noexcept { return 0; }
  /// Whether the chunk has no gradient in this step, or a parameter that a trainer lends has none.
  virtual bool absent(ChunkId) const { return false; }
  virtual bool absent(const ParamRun&) const noexcept { return false; }
  /// Returns the signal that is set once `chunk`'s gradient of this step has arrived, or once it is
  /// known that there is none. It is reset when the gradient is used.
  Signal& arrived(ChunkId chunk) noexcept { return arrived_[chunk]; }
  /// Brings the gradient to memory that the CPU can reach; `item` has the size that item_bytes()
  /// says.
  virtual Task<TypedSpan<const std::byte>> fetch(ChunkId chunk, std::span<std::byte> item) = 0;
  /// Brings the gradient to the device: returns it where it lives, or in `staging`, which is memory
  /// of the device.
  virtual Task<TypedDeviceSpan<const std::byte>> fetch_to_device(ChunkId chunk,
                                                                 std::span<std::byte> item,
                                                                 DeviceSpan<std::byte> staging);
  /// Frees the gradient's memory after the update has used it.
  virtual void drop(ChunkId) noexcept {}

 protected:
  explicit GradHome(Context& context);

  Context& context_;

 private:
  std::vector<Signal> arrived_;  // per chunk
};

/// A home to which the engine brings the gradients that a trainer has computed.
class UnitGradHome : public GradHome {
 public:
  using AllocateDevice =
      std::function<Task<DeviceBuffer>(std::uint64_t size_bytes, Purpose purpose)>;
  /// Makes the home on the tier that the placement names. `places` are for its file, if that is
  /// NVMe; `allocate` gives it the device's memory.
  static std::unique_ptr<UnitGradHome> create(Context& context, std::vector<StripePlace> places,
                                              AllocateDevice allocate);

  /// Takes `chunk`'s gradient from `source`; returns when `source` may be reused.
  virtual Task<> accept(ChunkId chunk, DeviceSpan<const std::byte> source, Need need) = 0;

  /// Says whether the chunk has a gradient in the step that is being made. Its last update is over.
  void set_absent(ChunkId chunk, bool absent) { absent_[chunk] = absent; }
  using GradHome::absent;
  bool absent(ChunkId chunk) const override { return absent_[chunk]; }

 protected:
  explicit UnitGradHome(Context& context)
      : GradHome(context), absent_(context.table.chunks().size()) {}
  /// Copies a gradient to host memory.
  Task<Lease> copied(ChunkId chunk, DeviceSpan<const std::byte> source, Need need);

 private:
  std::vector<bool> absent_;  // per chunk
};

}  // namespace ziggurat
