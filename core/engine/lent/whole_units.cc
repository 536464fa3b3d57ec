// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/whole_units.cc: puts units together of the slices of all ranks.
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

/// Copies of fewer bytes are made where they stand: a stream would cost more.
constexpr std::uint64_t kStreamedBytes = 64 * kKiB;
constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

/// What ranks compare of a whole parameter, and a rank's slice of it.
struct Announced {
  std::uint64_t hash = 0;
  std::uint64_t first = 0;
  std::uint64_t count = 0;
};

std::uint64_t hash_of(const WholeParam& its) {
  const std::string text =
      fmt::format("{}|{}|{}|{}|{}|{}", its.name, its.count, static_cast<int>(its.dtype), its.unit,
                  its.trained, its.optional);
  return hash64(std::as_bytes(std::span(text)), 0);
}

/// Whether `all` has one of `some`.
bool has_any(std::span<const std::size_t> all, std::span<const std::size_t> some) {
  return std::ranges::any_of(some,
                             [&](std::size_t w) { return std::ranges::find(all, w) != all.end(); });
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
  if (state.out_of_reach())
    throw Error(ErrorCode::kUnimplemented,
                "whole parameters of several ranks are brought to host memory only: give "
                "`device_memory` in place of a GPU's device");
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
                        "rank {} than on rank 0: give all ranks the same model",
                        w, wholes_[w].name, r));
      slices[r].push_back({.first = its.first, .count = its.count});
    }
  }
  layout_.set_slices(slices);
  parts_read_.emplace(context, home, world, 2 * largest_part_bytes());
  if (world == 1) co_return;
  service_ = std::make_unique<UnitService>(
      context.cancel, context.reactor, ranks,
      UnitService::Served{
          .slices = [this](StreamedUnit unit,
                           const UnitService::Give& give) { return give_slices(unit, give); },
          .spawn = [&context](Task<> task) { context.spawn_local(std::move(task)); }});
}

Task<> WholeUnits::begin_changes() {
  if (service_) co_await service_->begin_changes();
  parts_read_->forget();
}

void WholeUnits::begin_generation(std::uint64_t generation) {
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

Task<UnitParamHome::Loading> WholeUnits::load(UnitId unit, std::byte* destination, Need need,
                                              IoPriority priority) {
  const auto world = static_cast<std::size_t>(state_.runtime().ranks->world_size());
  std::vector<UnitService::Came> came(world, UnitService::Came::kWhole);
  WorkGroup loads(context_->reactor);
  for (std::size_t r = 0; r < world; ++r)
    if (r != rank()) loads.spawn(load_from(r, unit, destination, need.generation, came[r]));
  loads.spawn(load_own(unit, destination, need, priority));
  co_await loads.wait_idle();
  UnitParamHome::Loading loading;
  for (std::size_t r = 0; r < world; ++r) {
    if (came[r] == UnitService::Came::kWhole) continue;
    loading.stale = true;
    // What is brought ahead may not be needed any more.
    if (came[r] == UnitService::Came::kClosed && priority == IoPriority::kDemand)
      throw Error(
          ErrorCode::kUnavailable,
          fmt::format("rank {} has closed its engine, but has a part of unit {} ('{}'): use "
                      "the model before any rank closes its optimizer",
                      r, unit, name(unit)));
  }
  co_return loading;
}

Task<> WholeUnits::load_own(UnitId unit, std::byte* destination, Need need, IoPriority priority) {
  WorkGroup loads(context_->reactor);
  for (const Part& part : parts_[unit]) loads.spawn(load_part(part, destination, need, priority));
  co_await loads.wait_idle();
}

Task<> WholeUnits::load_part(const Part& part, std::byte* destination, Need need,
                             IoPriority priority) {
  const ReadOnce::Part fetched = co_await parts_read_->fetch(part.unit, need, priority);
  for (const std::size_t w : part.wholes) {
    const std::span<const std::byte> from = own_bytes(w, fetched.bytes);
    std::byte* const to = destination + layout_.range_of(rank(), w).begin;
    if (from.size() < kStreamedBytes) {
      std::memcpy(to, from.data(), from.size());
    } else {
      co_await copy(context_->reactor, *context_->to_device,
                    {.destination = to,
                     .source = from.data(),
                     .size_bytes = from.size(),
                     .direction = Stream::Direction::kToDevice});
    }
  }
}

/// Receives large slices where they belong, and small ones beside.
Task<> WholeUnits::load_from(std::size_t rank, UnitId unit, std::byte* destination,
                             std::uint64_t generation, UnitService::Came& came) {
  const std::vector<WholeLayout::Message> messages = layout_.messages_of(rank, unit);
  if (messages.empty()) co_return;
  std::vector<std::byte> small;
  std::vector<std::span<std::byte>> into;
  for (const WholeLayout::Message& message : messages) {
    if (message.wholes.size() == 1) {
      into.emplace_back(destination + layout_.range_of(rank, message.wholes[0]).begin,
                        message.bytes);
    } else {
      small.resize(message.bytes);
      into.emplace_back(small);
    }
  }
  came = co_await service_->bring(static_cast<int>(rank), unit, generation, into);
  if (came != UnitService::Came::kWhole || small.empty()) co_return;
  std::uint64_t at = 0;
  for (const std::size_t w : messages[0].wholes) {
    const WholeLayout::Range its = layout_.range_of(rank, w);
    std::memcpy(destination + its.begin, small.data() + at, its.bytes);
    at += its.bytes;
  }
}

/// Gives another rank this rank's slices of a unit. While it waits for memory of the pool it has
/// none: others may wait for that.
Task<> WholeUnits::give_slices(StreamedUnit unit, const UnitService::Give& give) {
  for (const WholeLayout::Message& message : layout_.messages_of(rank(), unit)) {
    const bool alone = message.wholes.size() == 1;
    std::vector<std::byte> together(alone ? 0 : message.bytes);
    for (const Part& part : parts_[unit]) {
      if (!has_any(part.wholes, message.wholes)) continue;
      co_await context_->gates.gate(part.unit).wait();
      const UnitUses::Use reading = co_await state_.reading(part.unit);
      const Need need{.generation = state_.generation(), .position = 0};
      const ReadOnce::Part fetched =
          co_await parts_read_->fetch(part.unit, need, IoPriority::kDemand);
      if (alone) {
        co_await give(own_bytes(message.wholes[0], fetched.bytes));
        continue;
      }
      std::uint64_t at = 0;
      for (const std::size_t w : message.wholes) {
        const std::uint64_t bytes = layout_.range_of(rank(), w).bytes;
        if (has_any(part.wholes, {{w}}))
          std::ranges::copy(own_bytes(w, fetched.bytes), together.begin() + std::ptrdiff_t(at));
        at += bytes;
      }
    }
    if (!alone) co_await give(together);
  }
}

}  // namespace ziggurat
