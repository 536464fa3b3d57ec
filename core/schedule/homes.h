// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes.h: where parameters and gradients live between uses, one class for each; of
// optimizer records, optimizer/record_home.h. The placement is chosen there and nowhere else:
// pipelines ask a home for bytes and do not know the tier.
//
// A chunk is updated by the CPU, with bytes that it can reach, or by the device, with bytes in the
// device's memory: a home gives either, where they live or in memory of the work item's.
// Reactor's thread only.
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

/// Parameters in the model's type: whole units, or in stage 3 this rank's slices.
class ParamHome {
 public:
  /// `places`: of its file, where parameters are on NVMe. `lent`: with Tier::kTrainer each unit's
  /// parameters, without padding.
  static std::unique_ptr<ParamHome> create(Context& context, std::vector<StripePlace> places,
                                           std::span<const TypedSpan<std::byte>> lent = {});

  /// Lease memory that a work item writing `chunk`'s parameters needs: 0 where they are updated in
  /// place.
  std::uint64_t item_bytes(const Chunk& chunk) const noexcept;
  /// Where the CPU's update writes `chunk`'s new parameters: at home, or in the item's memory.
  TypedSpan<std::byte> destination(ChunkId chunk, std::span<std::byte> item) const noexcept;
  /// `destination` is written: brings it home.
  Task<> publish(ChunkId chunk, TypedSpan<const std::byte> values);

  /// Where the device's update writes them: at home, or in `staging`, memory of the device.
  TypedDeviceSpan<std::byte> destination_on_device(ChunkId chunk,
                                                   DeviceSpan<std::byte> staging) const noexcept;
  /// Brings home what was written there, through the item's memory where they live on NVMe.
  Task<> publish_from_device(ChunkId chunk, TypedDeviceSpan<const std::byte> values,
                             std::span<std::byte> item);

  /// The same from a `record`, with the bits of the update that made it, its parameter's `step`;
  /// `item` as given by item_bytes().
  Task<> publish_record(ChunkId chunk, std::uint64_t step, std::span<const std::byte> record,
                        std::span<std::byte> item);
  /// Parameters stay in memory between updates, where `destination` is.
  bool in_memory() const noexcept { return tier_ != Tier::kNvme && !out_of_reach(); }
  /// They are the trainer's, who may write them between steps.
  bool is_lent() const noexcept { return tier_ == Tier::kTrainer; }

  /// The trainer uses whole units where they live: nothing is ever loaded.
  bool used_at_home() const noexcept;
  DeviceSpan<const std::byte> view(UnitId unit) const noexcept;
  /// The trainer has moved what it lends, while no update of it is under way.
  void lend(UnitId unit, TypedSpan<std::byte> params) noexcept { lent_[unit] = params; }
  /// A copy to the device that is queued.
  struct Loading {
    Event landed;
    Lease staging;  ///< what it reads where the home is no memory: kept until it has landed
  };
  /// Copies what is here of `unit` to its place in `destination`, where the unit is on the device.
  /// Returns once the copy is queued; it reads the home, or the staging, until it has landed.
  Task<Loading> load(UnitId unit, std::byte* destination, Need need, IoPriority priority);
  /// What is here of `unit`, for the CPU: where it lives, or read into memory on loan.
  struct Fetched {
    Lease lease;
    std::span<const std::byte> bytes;
  };
  Task<Fetched> fetch(UnitId unit, Need need, IoPriority priority);
  /// Stages 1 and 2: every rank has updated its slice of `unit`; brings the others' here. Calls of
  /// all ranks in one order, each after the one before has ended.
  Task<> gather(UnitId unit, Need need);
  /// Somebody waits for a load of `unit` that is under way.
  void hurry(UnitId unit);

 private:
  explicit ParamHome(Context& context) : context_(context), tier_(context.placement.params) {}
  /// They live where the CPU cannot touch them.
  bool out_of_reach() const noexcept {
    return tier_ == Tier::kDevice && !context_.device.host_accessible();
  }
  /// The chunk's place at home in what `unit` is the beginning of.
  TypedSpan<std::byte> in_unit(ChunkId chunk, std::byte* unit) const noexcept;
  struct Item {
    std::size_t index;    ///< in swap_
    std::uint64_t begin;  ///< element of the unit
    std::uint64_t count;
  };
  /// What `unit` is on NVMe.
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
  std::vector<Lease> host_;                          // per unit
  std::vector<DeviceBuffer> device_;                 // per unit
  std::vector<TypedSpan<std::byte>> lent_;           // per unit
  std::unique_ptr<SwapFile> swap_;                   // item per chunk, also of others' slices
  std::vector<std::span<const std::byte>> reading_;  // per unit, where a read is under way
};

/// Gradients between backward and the update, rounded to the model's type, or as they were lent.
class GradHome {
 public:
  using AllocateDevice =
      std::function<Task<DeviceBuffer>(std::uint64_t size_bytes, Purpose purpose)>;
  /// `places`: of its file, where gradients are on NVMe.
  static std::unique_ptr<GradHome> create(Context& context, std::vector<StripePlace> places,
                                          AllocateDevice allocate);

  std::uint64_t item_bytes(const Chunk& chunk) const noexcept;
  /// Takes `chunk`'s gradient from `source`; returns when `source` may be reused.
  Task<> accept(ChunkId chunk, DeviceSpan<const std::byte> source, Need need);
  /// With Tier::kTrainer, instead: the unit's gradient, without padding, in any type; the memory is
  /// the engine's until the unit is updated.
  void lend(UnitId unit, TypedSpan<const std::byte> gradient) noexcept { lent_[unit] = gradient; }
  /// The chunk has none in this step.
  bool absent(ChunkId chunk) const noexcept;
  /// Set once `chunk`'s gradient is here in this step, or it is known that there is none; reset as
  /// it is consumed.
  Signal& arrived(ChunkId chunk) noexcept { return arrived_[chunk]; }
  /// The gradient accepted before, wherever it is, for the CPU; `item` as given by item_bytes().
  Task<TypedSpan<const std::byte>> fetch(ChunkId chunk, std::span<std::byte> item);
  /// And for the device: where it lives, or in `staging`, memory of the device.
  Task<TypedDeviceSpan<const std::byte>> fetch_to_device(ChunkId chunk, std::span<std::byte> item,
                                                         DeviceSpan<std::byte> staging);
  /// The update has used it.
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
