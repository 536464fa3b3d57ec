// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/whole_units.h: a trainer's units of whole parameters, of which each rank has
// slices: this rank's come from their home, those of others from their ranks, or from the rank of
// this node that keeps a copy (node_copies.h).
//
// Quantized parameters travel as int8 codes (slice_codes.h), and a rank's own slices are rounded as
// if they had come from another rank, so that all ranks compute with the same bits. Who reads or
// writes parameters asks for them as they are (begin_exact()). At home nothing ever is rounded.
// For a device that the CPU cannot reach a unit is put together in host memory, and copied at once.
// Private to the engine. Reactor's thread, but for what says otherwise.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/device_span.h"
#include "core/engine/lent/node_copies.h"
#include "core/engine/lent/read_once.h"
#include "core/engine/lent/unit_service.h"
#include "core/engine/lent/whole_layout.h"
#include "core/engine/lent_engine.h"
#include "core/engine/state/training_state.h"
#include "core/schedule/params/brought_units.h"
#include "core/schedule/spare_buffers.h"

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

  /// Notes that this rank's trainer writes parameters, as those of all ranks do.
  void written() {
    if (copies_) copies_->written();
  }
  /// Returns what has come from other ranks. Any thread.
  FromRanks from_ranks() const noexcept {
    return {.bytes = from_ranks_bytes_, .other_nodes_bytes = from_nodes_bytes_};
  }
  /// Forgets what was read of parts that the trainer writes at home.
  void written_at_home() { parts_read_->forget(); }
  /// Whether the unit comes rounded, unless it is asked for as it is. Any thread, once it is open.
  bool quantized(UnitId unit) const {
    return layout_.units()[unit].quantized && layout_.group_ranks() > 1;
  }
  /// Loads of the unit that begin between these two bring it as it is.
  void begin_exact(UnitId unit) { ++forms_[unit].exact_wanted; }
  void end_exact(UnitId unit) { --forms_[unit].exact_wanted; }
  /// Returns how the newest load of the unit has brought it.
  WholeForm loaded_form(UnitId unit) const { return forms_[unit].loaded; }
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
  /// Returns the first rank of those from which this one brings slices; group_ranks() follow.
  std::size_t first_of_group() const;
  void find_parts();
  std::uint64_t largest_part_bytes() const;
  void require_all_in_wholes() const;
  std::span<const std::byte> own_bytes(std::size_t whole, std::span<const std::byte> part) const;
  /// Throws unless `hpz` divides a group's ranks into nodes.
  void find_nodes();
  std::size_t node_of(std::size_t rank) const noexcept { return rank / node_ranks_; }
  bool is_copied(UnitId unit, WholeForm form) const;
  std::size_t giver_of(std::size_t rank, UnitId unit, WholeForm form) const;
  Task<NodeCopies::Copy> copy_of(UnitService::Asked asked);
  Task<UnitService::Came> bring(std::size_t from, UnitService::Asked asked,
                                std::span<const std::span<std::byte>> messages,
                                const UnitService::Landed& landed);
  Task<UnitService::Came> give(UnitService::Asked asked, const UnitService::Give& give);
  Task<> give_slices(StreamedUnit unit, const std::vector<WholeLayout::Message>& messages,
                     const UnitService::Give& give);
  Task<> give_slice(std::span<const WholeLayout::Message> messages, std::span<const std::byte> part,
                    const UnitService::Give& give);
  Task<> fill(WholeLayout::Run run, bool quantized, std::span<const std::byte> part,
              std::span<std::byte> to);
  /// A unit that is being put together.
  struct Load {
    UnitId unit = 0;
    WholeForm form = WholeForm::kExact;
    std::uint64_t generation = 0;
    std::byte* to = nullptr;
  };
  Error of_closed(std::size_t owner, const Load& load, UnitService::Came came) const;
  Task<UnitParamHome::Loading> put_together(Load all, Need need, IoPriority priority);
  Task<> give_back(std::span<std::byte> staging, Event read);
  Task<> load_own(Load load, Need need, IoPriority priority);
  Task<> load_part(const Part& part, Load load, Need need, IoPriority priority);
  Task<> load_from(std::size_t rank, Load load, UnitService::Came& came);
  Task<> load_copy(std::size_t rank, Load load, UnitService::Came& came);
  Task<> put(std::size_t rank, const WholeLayout::Message& message, std::span<const std::byte> from,
             std::byte* unit);
  TypedSpan<std::byte> run_in(std::size_t rank, const WholeLayout::Run& run, std::byte* unit) const;

  TrainingState& state_;
  std::vector<WholeParam> wholes_;
  WholeLayout layout_;
  std::vector<std::vector<Part>> parts_;   // by unit
  std::vector<std::size_t> whole_of_own_;  // by ParamId
  struct Forms {
    std::size_t exact_wanted = 0;  // by so many at present
    WholeForm loaded = WholeForm::kExact;
  };
  std::vector<Forms> forms_;  // by unit
  Context* context_ = nullptr;
  UnitParamHome* home_ = nullptr;
  std::optional<ReadOnce> parts_read_;
  std::unique_ptr<UnitService> service_;   // null on one rank
  std::size_t node_ranks_ = 0;             // consecutive ranks; a whole group without hpZ
  std::optional<NodeCopies> copies_;       // with hpZ
  std::unique_ptr<SpareBuffers> staging_;  // null if the CPU reaches the device
  std::atomic<std::uint64_t> from_ranks_bytes_ = 0;
  std::atomic<std::uint64_t> from_nodes_bytes_ = 0;
};

}  // namespace ziggurat
