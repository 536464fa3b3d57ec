// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/whole_units.cc: finds which slices each rank has, and keeps this rank's at home.
// whole_messages.cc brings and gives them.
#include "core/engine/lent/whole_units.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>

#include "base/checksum.h"
#include "base/error.h"

namespace ziggurat {
namespace {

constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

/// What ranks compare of a whole parameter, and a rank's slice of it.
struct Announced {
  std::uint64_t hash = 0;
  std::uint64_t first = 0;
  std::uint64_t count = 0;
};

std::uint64_t hash_of(const WholeParam& its) {
  const std::string text =
      fmt::format("{}|{}|{}|{}|{}|{}|{}", its.name, its.count, static_cast<int>(its.dtype),
                  its.unit, its.trained, its.optional, its.quantized);
  return hash64(std::as_bytes(std::span(text)), 0);
}

[[noreturn]] void refuse_wholes(const std::string& why) {
  throw Error(ErrorCode::kInvalidArgument, why);
}

}  // namespace

WholeUnits::WholeUnits(TrainingState& state)
    : state_(state), wholes_(state.config().wholes), layout_(wholes_) {
  if (state.config().placement.params == Tier::kDevice)
    refuse_wholes(
        "`placement=params=device` cannot be used with whole parameters of several ranks: keep "
        "them on host or nvme");
  find_parts();
}

/// Finds which whole each of this rank's slices belongs to, and in which units of the table they
/// are.
void WholeUnits::find_parts() {
  whole_of_own_.assign(state_.lent_count(), kNone);
  parts_.resize(layout_.units().size());
  for (std::size_t w = 0; w < wholes_.size(); ++w) {
    const WholeParam& its = wholes_[w];
    if (!its.own) continue;
    if (*its.own >= whole_of_own_.size())
      refuse_wholes(
          fmt::format("whole parameter '{}': there is no parameter {}", its.name, *its.own));
    const ParamSpec& own = state_.lent_param(*its.own);
    const TrainingState::LentPlace& place = state_.lent_place(*its.own);
    if (own.streamed != its.unit || own.frozen == its.trained ||
        state_.table().dtype(place.unit) != its.dtype || its.first > its.count ||
        place.count > its.count - its.first)
      refuse_wholes(
          fmt::format("whole parameter '{}': parameter '{}' is no slice of it: give it the same "
                      "unit and type, and elements that the whole has",
                      its.name, own.name));
    if (whole_of_own_[*its.own] != kNone)
      refuse_wholes(fmt::format("parameter '{}' is a slice of whole parameter '{}' and of '{}'",
                                own.name, wholes_[whole_of_own_[*its.own]].name, its.name));
    whole_of_own_[*its.own] = w;
    std::vector<Part>& parts = parts_[its.unit];
    auto part = std::ranges::find(parts, place.unit, &Part::unit);
    if (part == parts.end()) part = parts.insert(part, {.unit = place.unit, .wholes = {}});
    part->wholes.push_back(w);
  }
  require_all_in_wholes();
}

void WholeUnits::require_all_in_wholes() const {
  for (ParamId own = 0; own < whole_of_own_.size(); ++own) {
    if (!state_.lent_param(own).streamed || whole_of_own_[own] != kNone) continue;
    refuse_wholes(
        fmt::format("streamed parameter '{}' is no whole parameter's slice: say of which it is one",
                    state_.lent_param(own).name));
  }
}

/// Returns the most that this rank has of a unit.
std::uint64_t WholeUnits::largest_part_bytes() const {
  std::uint64_t largest = 0;
  for (const std::vector<Part>& parts : parts_) {
    std::uint64_t bytes = 0;
    for (const Part& part : parts) bytes += state_.table().unit_param_bytes(part.unit);
    largest = std::max(largest, bytes);
  }
  return largest;
}

std::size_t WholeUnits::rank() const {
  return static_cast<std::size_t>(state_.runtime().ranks->rank());
}

std::size_t WholeUnits::first_of_group() const { return rank() - rank() % layout_.group_ranks(); }

Task<> WholeUnits::open(Context& context, UnitParamHome& home) {
  context_ = &context;
  home_ = &home;
  Communicator& ranks = *state_.runtime().ranks;
  const auto world = static_cast<std::size_t>(ranks.world_size());
  std::array<std::uint64_t, 2> counts{wholes_.size(), ~wholes_.size()};
  co_await ranks.all_reduce(counts, Communicator::Op::kMax);
  if (counts[0] != wholes_.size() || ~counts[1] != wholes_.size())
    refuse_wholes(fmt::format("ranks have {} to {} whole parameters: give all ranks the same model",
                              ~counts[1], counts[0]));
  std::vector<Announced> own(wholes_.size());
  for (std::size_t w = 0; w < wholes_.size(); ++w) {
    own[w].hash = hash_of(wholes_[w]);
    if (!wholes_[w].own) continue;
    own[w].first = wholes_[w].first;
    own[w].count = state_.lent_place(*wholes_[w].own).count;
  }
  std::vector<Announced> all(world * own.size());
  co_await ranks.all_gather(std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(all)));
  std::vector<std::vector<WholeLayout::Slice>> slices(world);
  for (std::size_t r = 0; r < world; ++r) {
    for (std::size_t w = 0; w < own.size(); ++w) {
      const Announced& its = all[r * own.size() + w];
      if (its.hash != all[w].hash)
        refuse_wholes(
            fmt::format("whole parameter {} ('{}' here) has another name, size, type or unit on "
                        "rank {} than on rank 0, or travels otherwise: give all ranks the same "
                        "model and settings",
                        w, wholes_[w].name, r));
      slices[r].push_back({.first = its.first, .count = its.count});
    }
  }
  layout_.set_slices(slices);
  forms_.resize(count());
  find_nodes();
  const std::size_t nodes = layout_.group_ranks() / node_ranks_;
  parts_read_.emplace(context, home, node_ranks_ + nodes - 1, 2 * largest_part_bytes());
  if (state_.out_of_reach())
    staging_ = std::make_unique<SpareBuffers>(
        context, kStagedGathers, state_.reduction().whole_unit_bytes, "units on their way");
  if (world == 1) co_return;
  service_ = std::make_unique<UnitService>(
      context.cancel, context.reactor, ranks,
      UnitService::Served{
          .slices = [this](const UnitService::Asked& asked,
                           const UnitService::Give& to) { return give(asked, to); },
          .spawn = [&context](Task<> task) { context.spawn_local(std::move(task)); }});
}

void WholeUnits::find_nodes() {
  const std::size_t group = layout_.group_ranks();
  node_ranks_ = group;
  const int hpz = state_.config().strategy.hpz;
  if (hpz == 0) return;
  node_ranks_ = static_cast<std::size_t>(hpz);
  if (node_ranks_ < 2 || node_ranks_ >= group || group % node_ranks_ != 0)
    refuse_wholes(
        fmt::format("`hpz={0}` does not divide the {1} ranks that share a copy of the state into "
                    "several groups of 2 or more: give a smaller divisor of {1}",
                    hpz, group));
  copies_.emplace(context_->cancel);
}

Task<> WholeUnits::begin_changes() {
  if (service_) co_await service_->begin_changes();
  parts_read_->forget();
}

void WholeUnits::begin_generation(std::uint64_t generation) {
  if (copies_) copies_->begin_generation();
  if (service_) service_->begin_generation(generation);
}

Task<> WholeUnits::close() {
  if (service_) co_await service_->close();
}

std::string WholeUnits::name(UnitId unit) const {
  return wholes_[layout_.units()[unit].wholes.front()].name + ", ...";
}

TypedDeviceSpan<std::byte> WholeUnits::place(std::size_t whole,
                                             DeviceSpan<const std::byte> unit) const {
  const WholeParam& its = wholes_[whole];
  const DeviceSpan<const std::byte> bytes =
      unit.subspan(layout_.offset_of(whole), its.count * size_bytes(its.dtype));
  return {its.dtype, {bytes.address(), bytes.size()}};
}

TypedDeviceSpan<std::byte> WholeUnits::place_of_own(ParamId own,
                                                    DeviceSpan<const std::byte> unit) const {
  const std::size_t whole = whole_of(own);
  return place(whole, unit).subspan(wholes_[whole].first, state_.lent_place(own).count);
}

/// Returns this rank's slice of a parameter, of which `part` is the unit of the table.
std::span<const std::byte> WholeUnits::own_bytes(std::size_t whole,
                                                 std::span<const std::byte> part) const {
  const TrainingState::LentPlace& place = state_.lent_place(*wholes_[whole].own);
  const std::size_t element_bytes = size_bytes(wholes_[whole].dtype);
  return part.subspan(place.begin * element_bytes, place.count * element_bytes);
}

Task<> WholeUnits::store(std::size_t whole, DeviceSpan<const std::byte> unit) {
  const WholeParam& written = wholes_[whole];
  if (!written.own) co_return;
  const UnitId stored = state_.lent_place(*written.own).unit;
  std::vector<UnitParamHome::Written> all;
  for (const Part& part : parts_[written.unit]) {
    if (part.unit != stored) continue;
    for (const std::size_t w : part.wholes) {
      const ParamId own = *wholes_[w].own;
      all.push_back({.at_bytes = state_.lent_place(own).begin * size_bytes(wholes_[w].dtype),
                     .from = place_of_own(own, unit).bytes});
    }
  }
  co_await home_->store(stored, all);
  parts_read_->forget();
}

Task<> WholeUnits::at_home(UnitId unit, bool awaited) {
  for (const Part& part : parts_[unit]) {
    if (awaited) {
      co_await context_->gates.wait(part.unit);
    } else {
      co_await context_->gates.gate(part.unit).wait();
    }
  }
}

void WholeUnits::hurry(UnitId unit) {
  for (const Part& part : parts_[unit]) home_->hurry(part.unit);
}

}  // namespace ziggurat
