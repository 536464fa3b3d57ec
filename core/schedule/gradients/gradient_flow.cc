// SPDX-License-Identifier: Apache-2.0
// core/schedule/gradients/gradient_flow.cc: accumulates a gradient, rounds it in place and copies
// it to its home.
#include "core/schedule/gradients/gradient_flow.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>

#include "base/bytes.h"
#include "base/check.h"
#include "base/memory_exhausted.h"
#include "optimizer/gradient.h"

namespace ziggurat {
namespace {

/// Two chunks are copied at a time, in pieces that are long enough to use a link well.
constexpr std::size_t kCopies = 2;
constexpr std::uint64_t kCopyCount = 16 * kTileElements;

std::uint64_t copy_bytes(const ChunkTable& table) {
  std::uint64_t largest_bytes = 0;
  for (const Chunk& chunk : table.chunks()) {
    const std::uint64_t count = std::min(kCopyCount, chunk.count);
    largest_bytes = std::max(largest_bytes, count * table.element_bytes(chunk.unit));
  }
  return largest_bytes;
}

}  // namespace

std::uint64_t GradientFlow::copies_bytes(const ChunkTable& table,
                                         const ReductionSettings& reduction) {
  const Sharding& sharding = table.sharding();
  const bool by_run = sharding.one_rank() && sharding.tensor.ranks > 1;
  return by_run && reduction.staged ? kCopies * copy_bytes(table) : 0;
}

GradientFlow::GradientFlow(Context& context, Residency& residency, UnitGradHome& home,
                           const Most& most, const ReductionSettings& reduction)
    : context_(context),
      residency_(residency),
      home_(home),
      stages_(context.table.unit_count(), Stage::kNone),
      buffers_(context.table.unit_count()),
      zeroed_(context.table.unit_count()),
      spare_returned_(context.cancel),
      norm_memory_(context.permanent_lease(
          Purpose::kStaging, GradientNorm::memory_bytes(context.table), "sums of squares",
          /*numa_node=*/-1, /*decides=*/true)),
      norm_(context.table, context.ranks.steps->rank(), norm_memory_.bytes()),
      own_most_(most.own),
      idle_(context.cancel) {
  idle_.set();
  const std::uint64_t largest_bytes = context.table.largest_unit_padded_count() * sizeof(float);
  for (std::size_t i = 0; i < most.set_aside; ++i) {
    spare_.push_back(context.device->allocate(largest_bytes, Purpose::kAccumulators));
  }
  if (copies_bytes(context.table, reduction) > 0)
    copies_ = std::make_unique<SpareBuffers>(context, kCopies, copy_bytes(context.table),
                                             "copies of gradients");
  if (!context.table.sharding().one_rank())
    reducer_ = std::make_unique<GradientReducer>(context, reduction, norm_);
}

/// Takes an accumulator that is set aside, or allocates one for the unit.
Task<DeviceBuffer> GradientFlow::take_accumulator(std::uint64_t size_bytes) {
  const std::uint64_t largest_bytes = context_.table.largest_unit_padded_count() * sizeof(float);
  if (takes_own_accumulator(size_bytes, largest_bytes)) {
    while (own_leaving_ >= own_most_) {
      spare_returned_.reset();
      co_await spare_returned_.wait();
    }
    co_return co_await one_more(size_bytes);
  }
  while (spare_.empty()) {
    if (units_under_way_ == 0) co_return co_await one_more(size_bytes);  // trainer holds all others
    spare_returned_.reset();
    co_await spare_returned_.wait();
  }
  DeviceBuffer buffer = std::move(spare_.back());
  spare_.pop_back();
  co_return buffer;
}

/// Whether it is not one of those that are set aside. A constant unit has none.
bool GradientFlow::is_own(const DeviceBuffer& accumulator) const {
  const std::uint64_t largest_bytes = context_.table.largest_unit_padded_count() * sizeof(float);
  return accumulator.size_bytes() > 0 && accumulator.size_bytes() != largest_bytes;
}

/// Allocates an accumulator beyond those that are set aside.
Task<DeviceBuffer> GradientFlow::one_more(std::uint64_t size_bytes) {
  try {
    co_return co_await residency_.allocate(size_bytes, Purpose::kAccumulators);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kResourceExhausted) throw;
    const auto held = std::ranges::count(stages_, Stage::kAccumulating) +
                      std::ranges::count(stages_, Stage::kKept);
    const Account account = context_.device->account();
    throw MemoryExhausted(
        {.budget = MemoryBudget::kDevice,
         .had_bytes = account.capacity_bytes(),
         .needed_bytes = account.used_bytes() + size_bytes},
        fmt::format("{}; the trainer asks for one more gradient while {} units have "
                    "gradients on the device. A trainer that runs each micro-batch through the "
                    "whole model, or ranks with optional units, need memory for the gradients of "
                    "all units, {}; in stage 3, reserve it with "
                    "EngineConfig::trainer_device_bytes",
                    error.what(), held,
                    format_bytes(context_.table.padded_count() * sizeof(float))));
  }
}

Task<GradientFlow::Accumulator> GradientFlow::accumulator(UnitId unit) {
  context_.cancel.check();
  const UnitChunks& chunks = context_.table.unit(unit);
  ZIGGURAT_CHECK(stages_[unit] != Stage::kFinished,
                 "unit {}: gradient() was called after finish_gradient()", unit);
  DeviceBuffer& buffer = buffers_[unit];
  if (stages_[unit] == Stage::kAccumulating) {
    const DeviceSpan<float> values = device_span(buffer).as<float>().first(chunks.count);
    co_return Accumulator{.values = values, .zeroed = zeroed_[unit]};
  }

  const std::uint64_t size_bytes = chunks.padded_count * sizeof(float);
  // The last gradient of the unit may not have been used before this. (A trainer that has acquired
  // the unit has waited for it already.)
  co_await context_.gates.wait(unit);
  buffer = co_await take_accumulator(size_bytes);
  stages_[unit] = Stage::kAccumulating;
  // A trainer's stream may still read parameters that were in this memory before.
  const std::vector<Event> before = buffer.before_use();
  for (const Event& read : before) co_await context_.compute->after(read);
  zeroed_[unit] = co_await context_.compute->clear(device_span(buffer).first(size_bytes));
  const DeviceSpan<float> values = device_span(buffer).as<float>().first(chunks.count);
  co_return Accumulator{.values = values, .zeroed = zeroed_[unit]};
}

void GradientFlow::finish(UnitId unit, std::uint64_t generation) {
  const UnitSpec& spec = context_.table.model().units[unit];
  ZIGGURAT_CHECK(
      stages_[unit] == Stage::kAccumulating || stages_[unit] == Stage::kKept || spec.constant(),
      "unit {}: finish_gradient() was called without gradient()", unit);
  stages_[unit] = Stage::kFinished;
  set_absent(unit, false);
  const Need need{.generation = generation, .position = finished_units_++};
  if (units_under_way_++ == 0) idle_.reset();
  if (is_own(buffers_[unit])) ++own_leaving_;
  std::shared_ptr<GradientReducer::Reduction> reduction;
  const bool zero = spec.frozen();  // on every rank
  if (reducer_ && !zero)
    reduction = reducer_->reduce(unit, device_span(buffers_[unit]).as<float>());
  context_.spawn(flow(unit, need, std::move(reduction)));
}

Task<> GradientFlow::flow(UnitId unit, Need need,
                          std::shared_ptr<GradientReducer::Reduction> reduction) {
  const UnitChunks& chunks = context_.table.unit(unit);
  WorkGroup group(context_.reactor);
  for (ChunkId id = chunks.first_chunk; id < chunks.first_chunk + chunks.chunk_count; ++id) {
    if (context_.table.chunk(id).constant) continue;
    const std::size_t in_slice =
        (id - chunks.first_chunk) % context_.table.slice_chunks(unit).size();
    const Chunk& chunk = context_.table.chunk(id);
    group.spawn(
        flow_chunk(id, device_span(buffers_[unit]).as<float>().subspan(chunk.begin, chunk.count),
                   need, reduction ? &reduction->reduced[in_slice] : nullptr));
  }
  co_await group.wait_idle();
  // The other ranks' chunks are also read from the accumulator, so it is kept until all are
  // reduced, even if none of them is this rank's.
  for (std::size_t i = 0; reduction && i < reduction->reduced.size(); ++i) {
    if (!context_.table.constant_everywhere(unit, i)) co_await reduction->reduced[i].wait();
  }
  DeviceBuffer buffer = std::move(buffers_[unit]);
  if (is_own(buffer)) {
    --own_leaving_;
  } else if (buffer.size_bytes() > 0) {
    spare_.push_back(std::move(buffer));
  }
  buffer = {};
  if (--units_under_way_ == 0) idle_.set();
  // Set even if no accumulator came back: a waiter may have waited for the last unit under way, and
  // must then allocate one.
  spare_returned_.set();
}

Task<> GradientFlow::flow_chunk(ChunkId id, DeviceSpan<float> accumulator, Need need,
                                Signal* reduced) {
  if (reduced != nullptr) {
    co_await reduced->wait();
  } else {
    co_await round(id, accumulator);
  }
  const DeviceSpan<std::byte> rounded =
      accumulator.as<std::byte>().first(context_.table.chunk(id).param_bytes());
  co_await home_.accept(id, rounded, need);
  // A chunk may be updated as soon as its gradient has arrived, so nobody may read its parameters
  // any more.
  co_await residency_.readers_done(context_.table.chunk(id).unit);
  home_.arrived(id).set();
}

/// Rounds a chunk's gradient in place: its 16-bit values begin where its fp32 values did.
Task<> GradientFlow::round(ChunkId id, DeviceSpan<float> accumulator) {
  const Chunk& chunk = context_.table.chunk(id);
  const TypedDeviceSpan<std::byte> rounded{context_.table.dtype(chunk.unit),
                                           accumulator.as<std::byte>().first(chunk.param_bytes())};
  const std::span<double> squares = norm_.whole_tiles(chunk.unit, chunk.begin, chunk.count);
  if (!squares.empty()) {
    const Compute::Rounding whole{.values = accumulator, .out = rounded, .squares = squares};
    co_await context_.compute->round(whole);
    co_return;
  }
  // Tiles in which tensor-parallel parts share a range are summed range by range.
  if (copies_) {
    const Compute::Rounding whole{.values = accumulator, .out = rounded, .squares = {}};
    co_await context_.compute->round(whole);
    co_await sum_copies(id, rounded);
    co_return;
  }
  const std::span<const std::byte> values =
      context_.compute->host_view(accumulator.as<std::byte>());
  const TypedSpan<std::byte> out{rounded.dtype, context_.compute->host_view(rounded.bytes)};
  const std::function<void()> job = [&] {
    norm_.round(chunk.unit, chunk.begin,
                {reinterpret_cast<const float*>(values.data()), chunk.count}, out);
  };
  co_await context_.workers.run(context_.reactor,
                                {"round gradient", values.size() + out.bytes.size()}, job);
}

/// Sums the squares of a gradient that the CPU cannot reach, from copies. A copy is rounded again,
/// which does not change its bits.
Task<> GradientFlow::sum_copies(ChunkId id, TypedDeviceSpan<const std::byte> rounded) {
  const Chunk& chunk = context_.table.chunk(id);
  const std::span<std::byte> buffer = co_await copies_->take();
  for (std::uint64_t first = 0; first < chunk.count; first += kCopyCount) {
    const std::uint64_t count = std::min(kCopyCount, chunk.count - first);
    const DeviceSpan<const std::byte> there = rounded.subspan(first, count).bytes;
    const TypedSpan<std::byte> copied{rounded.dtype, buffer.first(there.size())};
    co_await context_.copy_to_host(copied.bytes, there);
    const std::function<void()> job = [&] {
      std::array<float, kTileElements> values;
      for (std::uint64_t at = 0; at < count; at += kTileElements) {
        const TypedSpan<std::byte> tile = copied.subspan(at, kTileElements);
        widen(tile, values);
        norm_.round(chunk.unit, chunk.begin + first + at, values, tile);
      }
    };
    co_await context_.workers.run(context_.reactor, {"sum gradient", 2 * copied.bytes.size()}, job);
  }
  copies_->give_back(buffer);
}

void GradientFlow::keep(UnitId unit) {
  ZIGGURAT_CHECK(stages_[unit] == Stage::kAccumulating,
                 "unit {}: finish_gradient() was called without gradient()", unit);
  stages_[unit] = Stage::kKept;
}

Task<> GradientFlow::leave_out(UnitId unit) {
  co_await context_.gates.wait(unit);
  stages_[unit] = Stage::kFinished;
  norm_.leave_out(unit);
  set_absent(unit, true);
  co_await residency_.readers_done(unit);
  const UnitChunks& chunks = context_.table.unit(unit);
  for (ChunkId id = chunks.first_chunk; id < chunks.first_chunk + chunks.chunk_count; ++id)
    home_.arrived(id).set();
}

void GradientFlow::set_absent(UnitId unit, bool absent) {
  const UnitChunks& chunks = context_.table.unit(unit);
  for (ChunkId id = chunks.first_chunk; id < chunks.first_chunk + chunks.chunk_count; ++id)
    home_.set_absent(id, absent);
}

void GradientFlow::require_gradients() const {
  context_.cancel.check();
  for (UnitId unit = 0; unit < stages_.size(); ++unit) {
    const bool none = stages_[unit] == Stage::kNone && context_.table.model().units[unit].optional;
    if (none || finished(unit) || kept(unit)) continue;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("step() was called before unit {} ('{}') had its gradient: call "
                            "finish_gradient() for every unit",
                            unit, context_.table.model().units[unit].name));
  }
}

Task<> GradientFlow::all_arrived() { co_await idle_.wait(); }

void GradientFlow::begin_step() {
  std::fill(stages_.begin(), stages_.end(), Stage::kNone);
  finished_units_ = 0;
}

}  // namespace ziggurat
