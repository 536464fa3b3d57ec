// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/streamed_params.cc: finds the parts of a trainer's units, and brings them
// together.
#include "core/engine/lent/streamed_params.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/bytes.h"
#include "base/memory_exhausted.h"
#include "core/engine/state/residency_limits.h"
#include "tiers/pool/arena.h"

namespace ziggurat {
namespace {

/// The strictest alignment of a device's buffers.
constexpr std::uint64_t kAlignmentBytes = 4096;

}  // namespace

StreamedParams::StreamedParams(TrainingState& state) : state_(state) {
  if (!state.config().wholes.empty()) {
    made_ = std::make_unique<WholeUnits>(state);
    wholes_ = made_.get();
  }
  find_parts();
  require_device_room();
}

void StreamedParams::find_parts() {
  for (UnitId u = 0; wholes_ != nullptr && u < wholes_->count(); ++u) {
    units_.emplace_back();
    units_.back().parts.push_back({.unit = u});
  }
  if (wholes_ != nullptr) return;
  const std::vector<UnitSpec>& table = state_.model().units;
  for (UnitId u = 0; u < table.size(); ++u) {
    for (const ParamSpec& param : table[u].params) {
      if (!param.streamed) continue;
      if (*param.streamed >= units_.size()) units_.resize(*param.streamed + std::size_t{1});
      std::vector<Part>& parts = units_[*param.streamed].parts;
      if (parts.empty() || parts.back().unit != u) parts.push_back({.unit = u});
    }
  }
}

std::uint64_t StreamedParams::device_bytes(const Unit& unit) const {
  std::uint64_t total = 0;
  for (const Part& part : unit.parts)
    total += staggered_bytes(wholes_ != nullptr ? wholes_->device_bytes(part.unit)
                                                : state_.table().unit_param_bytes(part.unit),
                             kAlignmentBytes);
  return total;
}

std::uint64_t StreamedParams::free_device_bytes() const {
  const Account account = state_.device().account();
  return account.capacity_bytes() - account.used_bytes();
}

/// Throws unless the device holds the largest unit, or all of them if they live there.
void StreamedParams::require_device_room() const {
  const bool at_home = state_.config().placement.params == Tier::kDevice;
  std::uint64_t all_bytes = 0;
  std::size_t largest = 0;
  for (std::size_t u = 0; u < units_.size(); ++u) {
    all_bytes += device_bytes(units_[u]);
    if (device_bytes(units_[u]) > device_bytes(units_[largest])) largest = u;
  }
  const std::uint64_t needed_bytes = at_home ? all_bytes : device_bytes(units_[largest]);
  const std::uint64_t free_bytes = free_device_bytes();
  if (needed_bytes <= free_bytes) return;
  const std::string what = at_home ? "all streamed parameters, which live there,"
                                   : fmt::format("the parameters of unit {}", largest);
  throw MemoryExhausted(
      {.budget = MemoryBudget::kDevice,
       .had_bytes = free_bytes,
       .needed_bytes = needed_bytes,
       .smallest_bytes = needed_bytes},
      fmt::format("`device_memory` {} is too small; the smallest that works with these settings is "
                  "{} MiB: {} take {}",
                  format_bytes(free_bytes), round_up(needed_bytes, kMiB) / kMiB, what,
                  format_bytes(needed_bytes)));
}

std::unique_ptr<ParamHome> StreamedParams::make_home(Context& context,
                                                     const std::vector<StripePlace>& places) {
  auto home = UnitParamHome::create_streamed(context, places);
  home_ = home.get();
  return home;
}

Task<> StreamedParams::build(Context& context) {
  std::size_t most_parts = 1;
  for (const Unit& unit : units_) most_parts = std::max(most_parts, unit.parts.size());
  ResidencyLimits limits = residency_limits(state_.config(), state_.table());
  // The table's units are parts of the trainer's, of which two come ahead in any case.
  const std::size_t two_ahead = kUnitsAheadLeast * most_parts;
  limits.prefetch_units_max = std::max(limits.prefetch_units_max, two_ahead);
  if (wholes_ != nullptr) {
    limits.prefetch_units_max = two_ahead;  // which all ranks gather in one order
    co_await wholes_->open(context, *home_);
    residency_ = Residency::create(context, std::move(made_), limits);
  } else {
    residency_ = Residency::create(context, *home_, limits, nullptr);
  }
  turns_.emplace(context.cancel);
  residency_->wait_while([this] { return may_be_released(); });
  describe();
}

void StreamedParams::describe() const {
  std::uint64_t all_bytes = 0;
  std::uint64_t largest_bytes = 0;
  for (UnitId u = 0; u < state_.table().unit_count(); ++u)
    if (state_.table().has_home(u)) all_bytes += state_.table().unit_param_bytes(u);
  for (const Unit& unit : units_) largest_bytes = std::max(largest_bytes, device_bytes(unit));
  state_.notes().push_back(fmt::format(
      "{} of parameters in {} units are streamed from {}; {} are for those that are acquired, and "
      "the largest unit takes {}",
      format_bytes(all_bytes), units_.size(), to_string(state_.config().placement.params),
      format_bytes(state_.device().account().capacity_bytes()), format_bytes(largest_bytes)));
  bool any_quantized = false;
  for (StreamedUnit u = 0; u < units_.size(); ++u) any_quantized |= is_quantized(u);
  if (any_quantized) state_.describe_quantized_params();
}

void StreamedParams::acquiring(StreamedUnit unit) {
  const std::lock_guard lock(mutex_);
  ++units_[unit].acquiring;
  waiting_.push_back(std::this_thread::get_id());
}

/// A trainer may acquire on one thread and release on another.
void StreamedParams::released(StreamedUnit unit) {
  const std::lock_guard lock(mutex_);
  std::vector<std::thread::id>& holders = units_[unit].holders;
  const auto own = std::ranges::find(holders, std::this_thread::get_id());
  if (own == holders.end()) released_elsewhere_ = true;
  holders.erase(own != holders.end() ? own : holders.begin());
  ++releases_coming_;
}

/// Whether some thread has acquired a unit and does not itself wait for another. If threads release
/// what others have acquired, any may.
bool StreamedParams::may_be_released() const {
  const std::lock_guard lock(mutex_);
  if (ending_) return false;
  if (releases_coming_ > 0) return true;
  const auto waits = [&](std::thread::id thread) {
    return !released_elsewhere_ && std::ranges::find(waiting_, thread) != waiting_.end();
  };
  return std::ranges::any_of(
      units_, [&](const Unit& unit) { return !std::ranges::all_of(unit.holders, waits); });
}

void StreamedParams::end_waits() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  const std::weak_ptr<bool> alive = alive_;
  state_.runtime().reactor.post([this, alive] {
    if (!alive.expired()) residency_->look_again();
  });
}

/// Throws once waits are to end.
void StreamedParams::require_going_on() const {
  const std::lock_guard lock(mutex_);
  if (ending_) throw Error(ErrorCode::kCancelled, "the engine is being closed");
}

bool StreamedParams::is_held(StreamedUnit unit) const {
  const std::lock_guard lock(mutex_);
  return !units_[unit].holders.empty();
}

void StreamedParams::require_unit(const char* call, StreamedUnit unit) const {
  if (unit < units_.size()) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("{}(unit {}): the model has only units 0 to {}", call, unit, units_.size() - 1));
}

void StreamedParams::require_acquired(const char* call, StreamedUnit unit) const {
  require_unit(call, unit);
  if (is_held(unit)) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}(unit {}): the unit is not acquired: acquire it before", call, unit));
}

Error StreamedParams::not_streamed(const char* call, const ParamSpec& param) {
  return {ErrorCode::kInvalidArgument,
          fmt::format("{}('{}'): the parameter is in the caller's memory, and the engine "
                      "brings it nowhere",
                      call, param.name)};
}

void StreamedParams::require_free(const char* call, ParamId param) const {
  const ParamSpec& its = state_.lent_param(param);
  if (!its.streamed) throw not_streamed(call, its);
  if (!is_held(*its.streamed)) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}('{}'): its unit {} is acquired: release it before", call, its.name,
                          *its.streamed));
}

StreamedUnit StreamedParams::require_acquired_param(const char* call, ParamId param) const {
  if (const std::optional<std::size_t> whole = whole_of(param)) {
    const WholeParam& its = wholes_->param(*whole);
    if (is_held(its.unit)) return its.unit;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}('{}'): the parameter is away: acquire its unit {} before", call,
                            its.name, its.unit));
  }
  const ParamSpec& its = state_.lent_param(param);
  if (!its.streamed) throw not_streamed(call, its);
  if (is_held(*its.streamed)) return *its.streamed;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}('{}'): the parameter is away: acquire its unit {} before", call,
                          its.name, *its.streamed));
}

std::optional<Error> StreamedParams::refusal_of_step() const {
  const std::lock_guard lock(mutex_);
  for (std::size_t u = 0; u < units_.size(); ++u) {
    if (units_[u].holders.empty() && units_[u].acquiring == 0) continue;
    return Error(
        ErrorCode::kInvalidArgument,
        fmt::format("step(): unit {} is acquired{}, and its parameters would change under its "
                    "readers: release it before",
                    u, units_[u].holders.empty() ? " by another thread now" : ""));
  }
  return std::nullopt;
}

void StreamedParams::expect(std::span<const StreamedUnit> units) {
  std::vector<UnitId> parts;
  for (const StreamedUnit unit : units)
    for (const Part& part : units_[unit].parts) parts.push_back(part.unit);
  residency_->expect(parts);
}

Task<> StreamedParams::store(ParamId param, Event written) {
  const Part& part = part_of(param);
  co_await written.wait();
  co_await residency_->readers_done(part.unit);  // a copy to the device may read the home
  if (wholes_ != nullptr) {
    const std::optional<std::size_t> whole = whole_of(param);
    co_await wholes_->store(whole ? *whole : wholes_->whole_of(param), part.params);
    co_return;
  }
  const UnitParamHome::Written all{.at_bytes = 0, .from = part.params};
  co_await home_->store(part.unit, {&all, 1});
}

Task<> StreamedParams::read_home(ParamId param, TypedSpan<std::byte> values) {
  const TrainingState::LentPlace& place = state_.lent_place(param);
  const Need need{.generation = state_.generation(), .position = 0};
  const UnitParamHome::Fetched fetched =
      co_await home_->fetch(place.unit, need, IoPriority::kDemand);
  std::memcpy(values.bytes.data(), fetched.bytes.data() + place.begin * size_bytes(values.dtype),
              values.bytes.size());
}

Task<> StreamedParams::write_home(ParamId param, TypedSpan<const std::byte> values) {
  written(*state_.lent_param(param).streamed);
  co_await residency_->clear();  // what was brought before has the old values
  residency_->brings_ahead();
  Context& context = state_.context();
  for (const ChunkRun& its : state_.lent_runs(param)) {
    const Chunk& chunk = context.table.chunk(its.chunk);
    Lease item;
    if (const std::uint64_t item_bytes = home_->item_bytes(chunk); item_bytes > 0) {
      const LeaseRequest request{.purpose = Purpose::kParams,
                                 .size_bytes = item_bytes,
                                 .need = {.generation = state_.generation(), .position = 0},
                                 .holder = "parameter write"};
      item = co_await context.pool.acquire(request);
    }
    const TypedSpan<std::byte> destination = home_->destination(its.chunk, item.bytes());
    const std::vector<ParamRun> runs = state_.packed_runs(its.chunk);
    if (its.run.count < chunk.count) co_await home_->bring(its.chunk, item.bytes(), runs);
    const TypedSpan<const std::byte> from = values.subspan(its.run.first, its.run.count);
    copy_bytes(from.bytes, destination.subspan(its.run.begin, its.run.count).bytes);
    co_await home_->publish(its.chunk, destination, runs);
  }
  if (wholes_ != nullptr) wholes_->written_at_home();
}

std::optional<std::size_t> StreamedParams::whole_of(ParamId param) const {
  if (param < state_.lent_count()) return std::nullopt;
  return param - state_.lent_count();
}

std::optional<ParamId> StreamedParams::stored_in(ParamId param) const {
  const std::optional<std::size_t> whole = whole_of(param);
  return whole ? wholes_->param(*whole).own : param;
}

Task<> StreamedParams::settle() {
  for (const Unit& unit : units_)
    for (const Part& part : unit.parts) residency_->params_may_change(part.unit);
  if (wholes_ != nullptr) co_await wholes_->begin_changes();
  co_await residency_->quiesce();
  for (const Unit& unit : units_)
    for (const Part& part : unit.parts) co_await residency_->readers_done(part.unit);
}

const StreamedParams::Part& StreamedParams::part_of(ParamId param) const {
  if (const std::optional<std::size_t> whole = whole_of(param))
    return units_[wholes_->param(*whole).unit].parts.front();
  if (wholes_ != nullptr) return units_[*state_.lent_param(param).streamed].parts.front();
  const TrainingState::LentPlace& place = state_.lent_place(param);
  const std::vector<Part>& parts = units_[*state_.lent_param(param).streamed].parts;
  return *std::ranges::find(parts, place.unit, &Part::unit);
}

TypedDeviceSpan<std::byte> StreamedParams::place(ParamId param) const {
  const DeviceSpan<const std::byte> unit = part_of(param).params;
  if (const std::optional<std::size_t> whole = whole_of(param)) return wholes_->place(*whole, unit);
  if (wholes_ != nullptr) return wholes_->place_of_own(param, unit);
  const TrainingState::LentPlace& place = state_.lent_place(param);
  const TypedDeviceSpan<const std::byte> all{state_.table().dtype(place.unit), unit};
  const TypedDeviceSpan<const std::byte> its = all.subspan(place.begin, place.count);
  return {its.dtype, {its.bytes.address(), its.bytes.size()}};
}

}  // namespace ziggurat
