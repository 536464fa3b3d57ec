// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes.h: where parameters and gradients live between uses, one class for each.
// Optimizer records have optimizer/record_home.h. Only these classes know the placement: pipelines
// ask a home for bytes and do not know the tier.
//
// A chunk is updated either by the CPU, with bytes that the CPU can reach, or by the device, with
// bytes in the device's memory. A home can serve both: it gives the bytes where they live, or in
// memory of the work item. Reactor's thread only.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/typed_span.h"
#include "core/schedule/context.h"
#include "tiers/swap_file.h"

namespace ziggurat {

/// The home of parameters in the model's type: whole units, or in stage 3 this rank's slices.
class ParamHome {
 public:
  /// Makes the home. `places` are for its file, if parameters are on NVMe. `lent` has each unit's
  /// parameters without padding, if they are in the trainer's memory (Tier::kTrainer).
  static std::unique_ptr<ParamHome> create(Context& context, std::vector<StripePlace> places,
                                           std::span<const TypedSpan<std::byte>> lent = {});

  /// Returns how much lease memory a work item needs to write `chunk`'s parameters; 0 if they are
  /// updated in place.
  std::uint64_t item_bytes(const Chunk& chunk) const noexcept;
  /// Returns where the CPU's update writes `chunk`'s new parameters: at home, or in the item's
  /// memory.
  TypedSpan<std::byte> destination(ChunkId chunk, std::span<std::byte> item) const noexcept;
  /// Brings home the parameters that were written to destination().
  Task<> publish(ChunkId chunk, TypedSpan<const std::byte> values);

  /// Returns where the device's update writes the new parameters: at home, or in `staging`, which
  /// is memory of the device.
  TypedDeviceSpan<std::byte> destination_on_device(ChunkId chunk,
                                                   DeviceSpan<std::byte> staging) const noexcept;
  /// Brings home the parameters that were written to destination_on_device(). If they live on NVMe,
  /// they pass through the item's memory.
  Task<> publish_from_device(ChunkId chunk, TypedDeviceSpan<const std::byte> values,
                             std::span<std::byte> item);

  /// Makes the parameters from a `record` and brings them home. They have the bits of the update
  /// that made the record, which was step `step` of the parameter. `item` has the size that
  /// item_bytes() says.
  Task<> publish_record(ChunkId chunk, std::uint64_t step, std::span<const std::byte> record,
                        std::span<std::byte> item);
  /// Whether parameters stay in host-accessible memory between updates, at destination().
  bool in_memory() const noexcept { return tier_ != Tier::kNvme && !out_of_reach(); }
  /// Whether parameters are in memory that the trainer lends and may write between steps.
  bool is_lent() const noexcept { return tier_ == Tier::kTrainer; }

  /// Whether the trainer uses whole units where they live, so that nothing is ever loaded.
  bool used_at_home() const noexcept;
  DeviceSpan<const std::byte> view(UnitId unit) const noexcept;
  /// Tells the home that the trainer has moved the memory of `unit` that it lends. No update of the
  /// unit may be under way.
  void lend(UnitId unit, TypedSpan<std::byte> params) noexcept { lent_[unit] = params; }
  /// A copy to the device that is queued.
  struct Loading {
    Event landed;
    /// Host memory that the copy reads, if the home is not in memory; kept until the copy has
    /// ended.
    Lease staging;
  };
  /// Copies this rank's part of `unit` to its place in `destination`, the unit's memory on the
  /// device. Returns once the copy is queued. The copy reads the home or the staging until it has
  /// landed.
  Task<Loading> load(UnitId unit, std::byte* destination, Need need, IoPriority priority);
  /// This rank's part of a unit where the CPU can read it: at home, or in leased memory.
  struct Fetched {
    Lease lease;
    std::span<const std::byte> bytes;
  };
  Task<Fetched> fetch(UnitId unit, Need need, IoPriority priority);
  /// In stages 1 and 2: gathers the slices of `unit` that the other ranks have updated. All ranks
  /// make these calls in the same order, each after the previous one has ended.
  Task<> gather(UnitId unit, Need need);
  /// Raises the priority of a load of `unit` that is under way, because somebody waits for it.
  void hurry(UnitId unit);

 private:
  explicit ParamHome(Context& context) : context_(context), tier_(context.placement.params) {}
  /// Whether parameters live in memory that the CPU cannot touch.
  bool out_of_reach() const noexcept {
    return tier_ == Tier::kDevice && !context_.device.host_accessible();
  }
  /// Returns the chunk's place at home; `unit` is where the memory of its unit begins.
  TypedSpan<std::byte> in_unit(ChunkId chunk, std::byte* unit) const noexcept;
  struct Item {
    std::size_t index;    ///< number of the item in swap_
    std::uint64_t begin;  ///< the item's first element in its unit
    std::uint64_t count;
  };
  /// Lists the items that hold `unit` on NVMe.
  std::vector<Item> items(UnitId unit) const;
  std::size_t item_of(ChunkId chunk) const noexcept;
  bool gathered() const noexcept;
  Task<> read_items(const std::vector<Item>& items, std::span<std::byte> memory,
                    std::uint64_t begin, IoPriority priority);
  Task<> read_item(std::size_t item, std::span<std::byte> memory, IoPriority priority);
  Task<> write_item(std::size_t item, std::span<const std::byte> bytes);
  Task<> gather_swapped(UnitId unit, Need need);
  Task<> gather_staged(UnitId unit, Need need);

  Context& context_;
  Tier tier_;
  std::vector<Lease> host_;                 // per unit
  std::vector<DeviceBuffer> device_;        // per unit
  std::vector<TypedSpan<std::byte>> lent_;  // per unit
  std::unique_ptr<SwapFile> swap_;          // one item per chunk, other ranks' too
  // Per unit: memory into which a read is under way.
  std::vector<std::span<const std::byte>> reading_;
};

/// The home of gradients between backward and the update: rounded to the model's type, or as the
/// trainer lent them.
class GradHome {
 public:
  using AllocateDevice =
      std::function<Task<DeviceBuffer>(std::uint64_t size_bytes, Purpose purpose)>;
  /// Makes the home. `places` are for its file, if gradients are on NVMe.
  static std::unique_ptr<GradHome> create(Context& context, std::vector<StripePlace> places,
                                          AllocateDevice allocate);

  std::uint64_t item_bytes(const Chunk& chunk) const noexcept;
  /// Takes `chunk`'s gradient from `source`; returns when `source` may be reused.
  Task<> accept(ChunkId chunk, DeviceSpan<const std::byte> source, Need need);
  /// Takes the unit's gradient from the trainer (Tier::kTrainer), instead of accept(): without
  /// padding, in any type. The engine may use the memory until the unit is updated.
  void lend(UnitId unit, TypedSpan<const std::byte> gradient) noexcept { lent_[unit] = gradient; }
  /// Whether the chunk has no gradient in this step.
  bool absent(ChunkId chunk) const noexcept;
  /// Returns the signal that is set once `chunk`'s gradient of this step has arrived, or once it is
  /// known that there is none. It is reset when the gradient is used.
  Signal& arrived(ChunkId chunk) noexcept { return arrived_[chunk]; }
  /// Brings the accepted gradient to memory that the CPU can reach; `item` has the size that
  /// item_bytes() says.
  Task<TypedSpan<const std::byte>> fetch(ChunkId chunk, std::span<std::byte> item);
  /// Brings the accepted gradient to the device: returns it where it lives, or in `staging`, which
  /// is memory of the device.
  Task<TypedDeviceSpan<const std::byte>> fetch_to_device(ChunkId chunk, std::span<std::byte> item,
                                                         DeviceSpan<std::byte> staging);
  /// Frees the gradient's memory after the update has used it.
  void drop(ChunkId chunk) noexcept;

 private:
  GradHome(Context& context, AllocateDevice allocate);
  bool out_of_reach() const noexcept {
    return tier_ == Tier::kDevice && !context_.device.host_accessible();
  }

  Context& context_;
  Tier tier_;
  AllocateDevice allocate_;
  std::vector<Signal> arrived_;                   // per chunk
  std::vector<Lease> host_;                       // per chunk
  std::vector<DeviceBuffer> device_;              // per chunk
  std::vector<TypedSpan<const std::byte>> lent_;  // per unit
  std::unique_ptr<SwapFile> swap_;                // item per chunk
};

}  // namespace ziggurat
