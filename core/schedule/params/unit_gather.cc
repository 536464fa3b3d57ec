// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/unit_gather.cc: for each gather, waits for the update, loads this rank's
// slice and gathers the others.
#include "core/schedule/params/unit_gather.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/checksum.h"
#include "tiers/store/record_hash.h"

namespace ziggurat {
namespace {

/// The alignment of places: stricter than any device needs, and good for copies.
constexpr std::uint64_t kPlaceAlignment = 4096;

bool overlap(const UnitGather::Flight& a, const UnitGather::Flight& b) {
  return a.memory < b.memory + b.size_bytes && b.memory < a.memory + a.size_bytes;
}

}  // namespace

UnitGather::UnitGather(Context& context, UnitParamHome& home, DeviceBuffer region,
                       const ReductionSettings& settings)
    : context_(context),
      home_(home),
      region_(std::move(region)),
      arena_(region_.size_bytes(), kPlaceAlignment),
      idle_(context.cancel),
      piece_bytes_(piece_bytes(context.table, settings)) {
  idle_.set();
  if (context.table.sharding().quantization.weights)
    quantized_ = std::make_unique<QuantizedGather>(context);
  if (settings.staged) {
    staging_ = std::make_unique<SpareBuffers>(context, kStagedGathers, piece_bytes_,
                                              "gathered parameters");
  }
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

std::uint64_t UnitGather::piece_bytes(const ChunkTable& table, const ReductionSettings& settings) {
  const auto slices = static_cast<std::uint64_t>(table.sharding().world_size);
  const std::uint64_t tiles = settings.bucket_elements / slices / kTileElements;
  const std::uint64_t count = std::max<std::uint64_t>(1, tiles) * kTileElements;
  std::uint64_t largest_bytes = 0;
  for (UnitId u = 0; u < table.unit_count(); ++u) {
    const std::uint64_t its = std::min(count, table.unit(u).slice_count);
    largest_bytes = std::max(largest_bytes, its * table.element_bytes(u));
  }
  return slices * largest_bytes;
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
                                                .vacated = Signal(context_.cancel),
                                                .pieces_done = Signal(context_.cancel)});
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

void UnitGather::used_until(Flight& flight, const Event& read) {
  flight.readers.push_back(read);
  region_.used_until(read);
}

void UnitGather::free(const FlightPtr& flight) {
  arena_.free(static_cast<std::uint64_t>(flight->memory - region_.data()), flight->size_bytes);
  std::erase_if(left_, [](const FlightPtr& other) {
    return std::ranges::all_of(other->readers, &Event::happened);
  });
  if (!flight->readers.empty()) left_.push_back(flight);
}

void UnitGather::hurry(Flight& flight) {
  flight.wanted = true;
  home_.hurry(flight.unit);
}

/// Begins all gathers, in the order of the queue. No other function begins one.
Task<> UnitGather::drain() {
  while (!queue_.empty()) {
    const FlightPtr flight = queue_.front();
    co_await flight->updated->wait();
    co_await place_vacated(*flight);
    co_await issue(flight);
  }
  draining_ = false;
}

/// Waits until the place of `flight` may be overwritten. A unit that had the place before may have
/// been dropped while its slices were still coming, or while work that the trainer had queued still
/// read them.
Task<> UnitGather::place_vacated(const Flight& flight) {
  const std::vector<FlightPtr> before(under_way_.begin(), under_way_.end());
  for (const FlightPtr& other : before) {
    if (overlap(flight, *other)) co_await other->vacated.wait();
  }
  const std::vector<FlightPtr> left = left_;
  for (const FlightPtr& other : left) {
    if (!overlap(flight, *other)) continue;
    for (const Event& read : other->readers) co_await read.wait();
  }
}

Task<> UnitGather::load_own(const Flight& flight) {
  const UnitParamHome::Loading loading =
      co_await home_.load(flight.unit, flight.memory, flight.need,
                          flight.wanted ? IoPriority::kDemand : IoPriority::kPrefetch);
  co_await loading.landed.wait();
}

Task<UnitParamHome::Fetched> UnitGather::fetch_own(const Flight& flight) {
  return home_.fetch(flight.unit, flight.need,
                     flight.wanted ? IoPriority::kDemand : IoPriority::kPrefetch);
}

/// Returns the place of this rank's slice in the unit on the device.
std::span<std::byte> UnitGather::own_place(const Flight& flight) const {
  const ChunkTable& table = context_.table;
  const std::size_t element_bytes = table.element_bytes(flight.unit);
  return {flight.memory + table.own_begin(flight.unit) * element_bytes,
          table.unit(flight.unit).slice_count * element_bytes};
}

Task<> UnitGather::issue_quantized(const FlightPtr& flight) {
  UnitParamHome::Fetched own;
  if (staging_) {
    own = co_await fetch_own(*flight);
  } else {
    co_await load_own(*flight);
    own.bytes = own_place(*flight);
  }
  const QuantizedGather::Codes codes = co_await quantized_->encode(flight->unit, own.bytes);
  under_way(flight, quantized_->begin(codes), codes);
}

/// Gathers a unit in pieces. Every rank cuts its slice in the same way and makes the calls for the
/// pieces in the same order.
Task<> UnitGather::issue_pieces(const FlightPtr& flight) {
  Communicator* ranks = context_.ranks.params.get();
  if (flight->from_node) {
    Part& part = parts_[flight->unit];
    co_await part.there.wait();
    flight->own.bytes = part.bytes.bytes();
    ranks = context_.ranks.node.get();
  } else {
    flight->own = co_await fetch_own(*flight);
  }
  const std::span<const std::byte> own = flight->own.bytes;
  flight->missing_bytes = own.size();
  const std::uint64_t share = piece_share(flight->unit, ranks->world_size());
  for (std::uint64_t first = 0; first < own.size(); first += share) {
    Piece piece{.first_byte = first,
                .size_bytes = std::min(share, own.size() - first),
                .slice_bytes = own.size(),
                .buffer = {}};
    piece.buffer = co_await staging_->take();
    const auto slices = static_cast<std::uint64_t>(ranks->world_size());
    Task<> gathering = ranks->all_gather(own.subspan(first, piece.size_bytes),
                                         piece.buffer.first(slices * piece.size_bytes));
    context_.spawn(land_piece(flight, std::move(gathering), piece));
  }
  under_way(flight, flight->pieces_done.wait(), {});
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
  if (staging_) {
    co_await issue_pieces(flight);
    co_return;
  }
  const std::span<std::byte> whole(flight->memory, context_.table.unit_param_bytes(flight->unit));
  std::span<std::byte> own = own_place(*flight);
  Communicator* ranks = context_.ranks.params.get();
  if (flight->from_node) {
    Part& part = parts_[flight->unit];
    co_await part.there.wait();
    own = part_of(*flight);
    ranks = context_.ranks.node.get();
    co_await context_.copy_to_device(device_span(own), part.bytes.bytes());
  } else {
    co_await load_own(*flight);
  }
  under_way(flight, ranks->all_gather(own, whole), {});
}

/// Returns how many bytes of each of `slices` slices of the unit are in a piece: whole tiles.
std::uint64_t UnitGather::piece_share(UnitId unit, int slices) const noexcept {
  const std::uint64_t tile_bytes = kTileElements * context_.table.element_bytes(unit);
  return piece_bytes_ / static_cast<std::uint64_t>(slices) / tile_bytes * tile_bytes;
}

Task<> UnitGather::land_piece(FlightPtr flight, Task<> gathering, Piece piece) {
  co_await std::move(gathering);
  co_await bring(*flight, piece);
  staging_->give_back(piece.buffer);
  flight->missing_bytes -= piece.size_bytes;
  if (flight->missing_bytes > 0) co_return;
  flight->own = {};
  flight->pieces_done.set();
}

/// Copies each slice's part of a piece to its place on the device.
Task<> UnitGather::bring(const Flight& flight, Piece piece) {
  const std::span<std::byte> place(flight.memory + piece.first_byte, piece.size_bytes);
  const Context::DeviceRows places{
      .first = device_span(place),
      .count = context_.table.unit_param_bytes(flight.unit) / piece.slice_bytes,
      .stride_bytes = piece.slice_bytes};
  co_await context_.copy_rows_to_device(places,
                                        piece.buffer.first(places.count * piece.size_bytes));
}

/// Decodes all slices of a quantized unit to their places on the device.
Task<> UnitGather::decode(const Flight& flight, QuantizedGather::Codes codes) {
  const ChunkTable& table = context_.table;
  const std::uint64_t slice_count = table.unit(flight.unit).slice_count;
  co_await quantized_->finish(codes);
  if (!staging_) {
    co_await quantized_->decode(codes, {.first = 0, .count = slice_count},
                                {flight.memory, table.unit_param_bytes(flight.unit)});
    quantized_->give_back(codes);
    co_return;
  }
  const std::size_t element_bytes = table.element_bytes(flight.unit);
  const std::uint64_t share = piece_share(flight.unit, table.sharding().world_size);
  Piece piece{.first_byte = 0,
              .size_bytes = 0,
              .slice_bytes = slice_count * element_bytes,
              .buffer = co_await staging_->take()};
  for (; piece.first_byte < piece.slice_bytes; piece.first_byte += share) {
    piece.size_bytes = std::min(share, piece.slice_bytes - piece.first_byte);
    const QuantizedGather::Run run{.first = piece.first_byte / element_bytes,
                                   .count = piece.size_bytes / element_bytes};
    co_await quantized_->decode(codes, run, piece.buffer);
    co_await bring(flight, piece);
  }
  staging_->give_back(piece.buffer);
  quantized_->give_back(codes);
}

/// Returns the place of this rank's part in the unit on the device.
std::span<std::byte> UnitGather::part_of(const Flight& flight) const {
  const std::size_t size_bytes = parts_[flight.unit].bytes.bytes().size();
  const auto rank = static_cast<std::size_t>(context_.ranks.node->rank());
  return {flight.memory + rank * size_bytes, size_bytes};
}

Task<> UnitGather::keep_part(const Flight& flight) {
  Part& part = parts_[flight.unit];
  co_await context_.copy_to_host(part.bytes.bytes(), device_span(part_of(flight)));
  part.there.set();
}

Task<> UnitGather::land(FlightPtr flight, Task<> gathering, QuantizedGather::Codes codes) {
  co_await std::move(gathering);
  if (!codes.buffer.empty()) co_await decode(*flight, codes);
  flight->done.set();
  if (!parts_.empty() && !flight->from_node) co_await keep_part(*flight);
  under_way_.remove(flight);
  flight->vacated.set();
  if (queue_.empty() && under_way_.empty()) idle_.set();
}

Task<> UnitGather::idle() { co_await idle_.wait(); }

std::uint64_t UnitGather::take_order() noexcept { return std::exchange(order_, 0); }

}  // namespace ziggurat
