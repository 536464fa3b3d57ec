// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes/param_home.h: where parameters in the model's type live between uses, one
// class for each tier: whole units, or in stage 3 this rank's slices. Only these classes know the
// tier: pipelines ask a home for bytes. make_param_home.cc chooses among them.
//
// A chunk is updated either by the CPU, with bytes that the CPU can reach, or by the device, with
// bytes in the device's memory. A home serves both: it gives the bytes where they live, or in
// memory of the work item. Reactor's thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/typed_span.h"
#include "core/schedule/context.h"
#include "tiers/store/swap_file.h"

namespace ziggurat {

/// How many steps parameters have made, on which the rounding of their values depends.
struct ParamSteps {
  std::uint64_t generation;                 ///< of all, if `own` is empty
  std::span<const std::uint64_t> own = {};  ///< by ParamSpec::lent
  std::uint64_t of(ParamId lent) const noexcept { return own.empty() ? generation : own[lent]; }
};

/// What an update needs of a home.
class ParamHome {
 public:
  /// Makes the home of parameters that the trainer lends (Context::lent).
  static std::unique_ptr<ParamHome> create_lent(Context& context);
  virtual ~ParamHome() = default;
  ParamHome(const ParamHome&) = delete;
  ParamHome& operator=(const ParamHome&) = delete;

  /// Returns how much lease memory a work item needs to write `chunk`'s parameters; 0 if they are
  /// updated in place.
  virtual std::uint64_t item_bytes(const Chunk& chunk) const noexcept = 0;
  /// Returns where the CPU's update writes `chunk`'s new parameters: at home, or in the item's
  /// memory.
  virtual TypedSpan<std::byte> destination(ChunkId chunk,
                                           std::span<std::byte> item) const noexcept = 0;
  /// Brings the chunk's parameters to destination(), if they live elsewhere; of lent ones in a
  /// packed unit only those of `runs`. Called before publish() writes only some of a chunk's
  /// parameters, and where masters are made from parameters.
  virtual Task<> bring(ChunkId, std::span<std::byte>, std::span<const ParamRun>) { co_return; }
  /// Brings home the parameters that were written to destination(): all of the chunk's, or of a
  /// packed unit only those of `runs`.
  virtual Task<> publish(ChunkId chunk, TypedSpan<const std::byte> values,
                         std::span<const ParamRun> runs) = 0;

  /// Returns where the device's update writes the new parameters: at home, or in `staging`, which
  /// is memory of the device.
  virtual TypedDeviceSpan<std::byte> destination_on_device(
      ChunkId chunk, DeviceSpan<std::byte> staging) const noexcept;
  /// Brings home the parameters that were written to destination_on_device(). They may pass through
  /// the item's memory.
  virtual Task<> publish_from_device(ChunkId chunk, TypedDeviceSpan<const std::byte> values,
                                     std::span<std::byte> item);

  /// Makes the parameters from a `record` and brings them home, of a packed unit only those of
  /// `runs`. They have the bits of the update that made the record, after `steps`. `item` has the
  /// size that item_bytes() says.
  Task<> publish_record(ChunkId chunk, ParamSteps steps, std::span<const std::byte> record,
                        std::span<std::byte> item, std::span<const ParamRun> runs);
  /// Whether parameters that nobody has published are zeros.
  virtual bool begins_with_zeros() const noexcept { return true; }
  /// Whether the unit's parameters stay in host-accessible memory between updates, at
  /// destination().
  virtual bool in_memory(UnitId unit) const noexcept = 0;

 protected:
  explicit ParamHome(Context& context) : context_(context) {}

  Context& context_;
};

/// A home whose units are brought to a trainer.
class UnitParamHome : public ParamHome {
 public:
  /// Makes the home on the tier that the placement names. `places` are for its file, if that is
  /// NVMe.
  static std::unique_ptr<UnitParamHome> create(Context& context, std::vector<StripePlace> places);
  /// Makes the same for a trainer that lends the other parameters (ParamSpec::streamed).
  static std::unique_ptr<UnitParamHome> create_streamed(Context& context,
                                                        std::vector<StripePlace> places);

  /// Whether the trainer uses whole units where they live, at view(), so that nothing is ever
  /// loaded.
  virtual bool used_at_home() const noexcept { return false; }
  virtual DeviceSpan<const std::byte> view(UnitId) const noexcept { return {}; }
  /// Notes that work of the trainer uses the unit at view() until `read` happens.
  virtual void used_until(UnitId, const Event& read) { static_cast<void>(read); }
  /// A copy to the device that is queued.
  struct Loading {
    Event landed;
    /// Another rank had no such values any more: nothing was copied, and nobody needs the unit.
    bool stale = false;
    /// Host memory that the copy reads, if the home is not in memory; kept until the copy has
    /// ended.
    Lease staging;
  };
  /// Copies this rank's part of `unit` to its place in `destination`, the unit's memory on the
  /// device. Returns once the copy is queued. The copy reads the home or the staging until it has
  /// landed.
  virtual Task<Loading> load(UnitId unit, std::byte* destination, Need need, IoPriority priority);
  /// This rank's part of a unit where the CPU can read it: at home, or in leased memory.
  struct Fetched {
    Lease lease;
    std::span<const std::byte> bytes;
  };
  virtual Task<Fetched> fetch(UnitId unit, Need need, IoPriority priority) = 0;
  /// In stages 1 and 2: gathers the slices of `unit` that the other ranks have updated. All ranks
  /// make these calls in the same order, each after the previous one has ended.
  virtual Task<> gather(UnitId unit, Need need) = 0;
  /// Raises the priority of a load of `unit` that is under way, because somebody waits for it.
  virtual void hurry(UnitId) {}
  /// Values of this rank's part of a unit, in the device's memory.
  struct Written {
    std::uint64_t at_bytes;  ///< where they belong in the part
    DeviceSpan<const std::byte> from;
  };
  /// Brings home what the trainer has written: `written` has all of this rank's part of `unit`, but
  /// for its padding.
  virtual Task<> store(UnitId unit, std::span<const Written> written) = 0;

 protected:
  using ParamHome::ParamHome;
  /// Returns the bytes of this rank's part of a unit.
  std::uint64_t home_bytes(UnitId unit) const noexcept {
    return context_.table.home_count(unit) * context_.table.element_bytes(unit);
  }
  /// Returns the chunk's place at home; `unit` is where the memory of its unit begins.
  TypedSpan<std::byte> in_unit(ChunkId chunk, std::byte* unit) const noexcept;
  /// Returns the copy of this rank's part from `source` to its place in `destination`.
  Stream::Copy loading(UnitId unit, std::byte* destination, const std::byte* source,
                       Stream::Direction direction) const noexcept;
  Task<Lease> lease(std::uint64_t size_bytes, Need need, const char* holder);
  Task<> copy_written(std::span<const Written> written, std::span<std::byte> part);
  /// Gathers a whole unit in host memory, where this rank's slice is.
  Task<> gather_in(UnitId unit, std::span<std::byte> whole);
};

}  // namespace ziggurat
