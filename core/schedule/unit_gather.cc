// SPDX-License-Identifier: Apache-2.0
// core/schedule/unit_gather.cc: wait for the update, load the own slice, gather the rest.
#include "core/schedule/unit_gather.h"

#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/checksum.h"

namespace ziggurat {
namespace {

/// Of places: more than any device asks for, and what copies like.
constexpr std::uint64_t kPlaceAlignment = 4096;

bool overlap(const UnitGather::Flight& a, const UnitGather::Flight& b) {
  return a.memory < b.memory + b.size_bytes && b.memory < a.memory + a.size_bytes;
}

}  // namespace

UnitGather::UnitGather(Context& context, ParamHome& home, DeviceBuffer region)
    : context_(context),
      home_(home),
      region_(std::move(region)),
      arena_(region_.size_bytes(), kPlaceAlignment),
      idle_(context.reactor) {
  idle_.set();
}

std::uint64_t UnitGather::place_bytes(const ChunkTable& table, UnitId unit) noexcept {
  return round_up(table.unit_param_bytes(unit), kPlaceAlignment);
}

std::shared_ptr<UnitGather::Flight> UnitGather::start(UnitId unit, Need need, Signal& updated) {
  const std::uint64_t size_bytes = place_bytes(context_.table, unit);
  const std::optional<std::uint64_t> offset = arena_.allocate(size_bytes);
  if (!offset) return nullptr;
  auto flight = std::make_shared<Flight>(Flight{.unit = unit,
                                                .memory = region_.data() + *offset,
                                                .size_bytes = size_bytes,
                                                .updated = &updated,
                                                .need = need,
                                                .done = Signal(context_.reactor)});
  order_ = mix_seed(order_, unit + 1);
  queue_.push_back(flight);
  idle_.reset();
  if (!std::exchange(draining_, true)) context_.spawn(drain());
  return flight;
}

void UnitGather::free(const Flight& flight) noexcept {
  arena_.free(static_cast<std::uint64_t>(flight.memory - region_.data()), flight.size_bytes);
}

void UnitGather::hurry(Flight& flight) {
  flight.wanted = true;
  home_.hurry(flight.unit);
}

/// The only place where a gather begins.
Task<> UnitGather::drain() {
  const ChunkTable& table = context_.table;
  const std::size_t element_bytes = size_bytes(table.dtype());
  while (!queue_.empty()) {
    const FlightPtr flight = queue_.front();
    co_await flight->updated->wait();
    // Whoever had this place before may have been dropped while its slices were still coming.
    const std::vector<FlightPtr> before(under_way_.begin(), under_way_.end());
    for (const FlightPtr& other : before) {
      if (overlap(*flight, *other)) co_await other->done.wait();
    }
    co_await home_.load(flight->unit, flight->memory, flight->need,
                        flight->wanted ? IoPriority::kDemand : IoPriority::kPrefetch);
    const std::span<std::byte> whole(flight->memory, table.unit_param_bytes(flight->unit));
    Task<> gathering = context_.ranks.params->all_gather(
        whole.subspan(table.own_begin(flight->unit) * element_bytes,
                      table.unit(flight->unit).slice_count * element_bytes),
        whole);
    queue_.pop_front();
    under_way_.push_back(flight);
    context_.spawn(land(flight, std::move(gathering)));
  }
  draining_ = false;
}

Task<> UnitGather::land(FlightPtr flight, Task<> gathering) {
  co_await std::move(gathering);
  under_way_.remove(flight);
  flight->done.set();
  if (queue_.empty() && under_way_.empty()) idle_.set();
}

Task<> UnitGather::idle() { co_await idle_.wait(); }

std::uint64_t UnitGather::take_order() noexcept { return std::exchange(order_, 0); }

void UnitGather::fail(std::exception_ptr error) {
  for (const FlightPtr& flight : queue_) flight->done.fail(error);
  for (const FlightPtr& flight : under_way_) flight->done.fail(error);
  idle_.fail(error);
}

}  // namespace ziggurat
