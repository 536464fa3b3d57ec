// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/whole_units.h: a trainer's units of whole parameters, of which each rank has
// slices: this rank's come from their home, those of others from their ranks. Private to the
// engine. Reactor's thread, but for what says otherwise.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/device_span.h"
#include "core/engine/lent/read_once.h"
#include "core/engine/lent/unit_service.h"
#include "core/engine/lent/whole_layout.h"
#include "core/engine/state/training_state.h"
#include "core/schedule/params/brought_units.h"

namespace ziggurat {

class WholeUnits final : public BroughtUnits {
 public:
  /// `state` must have its table. Errors: kInvalidArgument for wholes that do not fit it.
  explicit WholeUnits(TrainingState& state);

  /// Compares the units with those of the other ranks, and learns which slices these have. All
  /// ranks call it. Errors: kInvalidArgument, on every rank, naming the parameter.
  Task<> open(Context& context, UnitParamHome& home);
  /// As UnitService's.
  Task<> begin_changes();
  void begin_generation(std::uint64_t generation);
  Task<> close();

  // Any thread.
  const WholeLayout& layout() const noexcept { return layout_; }
  const WholeParam& param(std::size_t whole) const { return wholes_[whole]; }
  std::size_t param_count() const noexcept { return wholes_.size(); }
  /// Returns where a whole parameter is in its unit's memory.
  TypedDeviceSpan<std::byte> place(std::size_t whole, DeviceSpan<const std::byte> unit) const;
  /// Returns which whole parameter this rank's slice `own` belongs to, a parameter of the table.
  std::size_t whole_of(ParamId own) const { return whole_of_own_[own]; }
  /// Returns where this rank's slice `own` is.
  TypedDeviceSpan<std::byte> place_of_own(ParamId own, DeviceSpan<const std::byte> unit) const;

  /// Forgets what was read of parts that the trainer writes at home.
  void written_at_home() { parts_read_->forget(); }
  /// Brings home what this rank has of the parameter, which its trainer has written in `unit`'s
  /// memory, with its neighbours in the same unit of the table.
  Task<> store(std::size_t whole, DeviceSpan<const std::byte> unit);

  std::size_t count() const noexcept override { return layout_.units().size(); }
  std::uint64_t elements(UnitId unit) const override { return layout_.units()[unit].elements; }
  std::uint64_t device_bytes(UnitId unit) const override { return layout_.units()[unit].bytes; }
  std::uint64_t used_bytes(UnitId unit) const override { return device_bytes(unit); }
  bool optional(UnitId unit) const override { return layout_.units()[unit].optional; }
  bool trained(UnitId unit) const override { return layout_.units()[unit].trained; }
  std::string name(UnitId unit) const override;
  Task<> at_home(UnitId unit, bool awaited) override;
  Task<UnitParamHome::Loading> load(UnitId unit, std::byte* destination, Need need,
                                    IoPriority priority) override;
  void hurry(UnitId unit) override;

 private:
  /// What this rank has of a unit in one unit of the table.
  struct Part {
    UnitId unit;
    std::vector<std::size_t> wholes;
  };
  std::size_t rank() const;
  void find_parts();
  std::uint64_t largest_part_bytes() const;
  void require_all_in_wholes() const;
  std::span<const std::byte> own_bytes(std::size_t whole, std::span<const std::byte> part) const;
  Task<> give_slices(StreamedUnit unit, const UnitService::Give& give);
  Task<> load_own(UnitId unit, std::byte* destination, Need need, IoPriority priority);
  Task<> load_part(const Part& part, std::byte* destination, Need need, IoPriority priority);
  Task<> load_from(std::size_t rank, UnitId unit, std::byte* destination, std::uint64_t generation,
                   UnitService::Came& came);

  TrainingState& state_;
  std::vector<WholeParam> wholes_;
  WholeLayout layout_;
  std::vector<std::vector<Part>> parts_;   // by unit
  std::vector<std::size_t> whole_of_own_;  // by ParamId
  Context* context_ = nullptr;
  UnitParamHome* home_ = nullptr;
  std::optional<ReadOnce> parts_read_;
  std::unique_ptr<UnitService> service_;  // null on one rank
};

}  // namespace ziggurat
