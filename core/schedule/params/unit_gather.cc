// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/unit_gather.cc: wait for the update, load the own slice, gather the rest.
#include "core/schedule/params/unit_gather.h"

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
      idle_(context.cancel) {
  idle_.set();
  if (context.table.sharding().quantization.weights)
    quantized_ = std::make_unique<QuantizedGather>(context);
  if (!context.ranks.node) return;
  for (UnitId u = 0; u < context.table.unit_count(); ++u) {
    parts_.emplace_back(context.cancel);
    parts_.back().bytes = context.permanent_lease(
        Purpose::kParams, context.table.node_part_bytes(u), "second partition");
  }
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
                                                .done = Signal(context_.cancel),
                                                .vacated = Signal(context_.cancel)});
  if (!parts_.empty()) {
    Part& part = parts_[unit];
    flight->from_node = part.generation == need.generation;
    if (!flight->from_node) part.there.reset();
    part.generation = need.generation;
  }
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
  while (!queue_.empty()) {
    const FlightPtr flight = queue_.front();
    co_await flight->updated->wait();
    // Whoever had this place before may have been dropped while its slices were still coming.
    const std::vector<FlightPtr> before(under_way_.begin(), under_way_.end());
    for (const FlightPtr& other : before) {
      if (overlap(*flight, *other)) co_await other->vacated.wait();
    }
    co_await issue(flight);
  }
  draining_ = false;
}

Task<> UnitGather::load_own(const Flight& flight) {
  co_await home_.load(flight.unit, flight.memory, flight.need,
                      flight.wanted ? IoPriority::kDemand : IoPriority::kPrefetch);
}

Task<> UnitGather::issue_quantized(const FlightPtr& flight) {
  co_await load_own(*flight);
  const QuantizedGather::Codes codes = co_await quantized_->encode(flight->unit, flight->memory);
  under_way(flight, quantized_->begin(codes), codes);
}

void UnitGather::under_way(const FlightPtr& flight, Task<> gathering,
                           QuantizedGather::Codes codes) {
  queue_.pop_front();
  under_way_.push_back(flight);
  context_.spawn(land(flight, std::move(gathering), codes));
}

Task<> UnitGather::issue(const FlightPtr& flight) {
  if (quantized_ && !flight->from_node) {
    co_await issue_quantized(flight);
    co_return;
  }
  const ChunkTable& table = context_.table;
  const std::size_t element_bytes = size_bytes(table.dtype());
  const std::span<std::byte> whole(flight->memory, table.unit_param_bytes(flight->unit));
  std::span<std::byte> own = whole.subspan(table.own_begin(flight->unit) * element_bytes,
                                           table.unit(flight->unit).slice_count * element_bytes);
  Communicator* ranks = context_.ranks.params.get();
  if (flight->from_node) {
    Part& part = parts_[flight->unit];
    co_await part.there.wait();
    own = part_of(*flight);
    ranks = context_.ranks.node.get();
    const Stream::Copy request{.destination = own.data(),
                               .source = part.bytes.bytes().data(),
                               .size_bytes = own.size(),
                               .direction = Stream::Direction::kToDevice};
    co_await copy(context_.reactor, context_.to_device, request);
  } else {
    co_await load_own(*flight);
  }
  under_way(flight, ranks->all_gather(own, whole), {});
}

/// This rank's, where the unit is on the device.
std::span<std::byte> UnitGather::part_of(const Flight& flight) const {
  const std::size_t size_bytes = parts_[flight.unit].bytes.bytes().size();
  const auto rank = static_cast<std::size_t>(context_.ranks.node->rank());
  return {flight.memory + rank * size_bytes, size_bytes};
}

Task<> UnitGather::keep_part(const Flight& flight) {
  Part& part = parts_[flight.unit];
  const Stream::Copy request{.destination = part.bytes.bytes().data(),
                             .source = part_of(flight).data(),
                             .size_bytes = part.bytes.bytes().size(),
                             .direction = Stream::Direction::kToHost};
  co_await copy(context_.reactor, context_.to_host, request);
  part.there.set();
}

Task<> UnitGather::land(FlightPtr flight, Task<> gathering, QuantizedGather::Codes codes) {
  co_await std::move(gathering);
  if (!codes.buffer.empty()) co_await quantized_->finish(codes, flight->memory);
  flight->done.set();
  if (!parts_.empty() && !flight->from_node) co_await keep_part(*flight);
  under_way_.remove(flight);
  flight->vacated.set();
  if (queue_.empty() && under_way_.empty()) idle_.set();
}

Task<> UnitGather::idle() { co_await idle_.wait(); }

std::uint64_t UnitGather::take_order() noexcept { return std::exchange(order_, 0); }

}  // namespace ziggurat
