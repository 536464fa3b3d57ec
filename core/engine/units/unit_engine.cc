// SPDX-License-Identifier: Apache-2.0
// core/engine/units/unit_engine.cc: the calls for units that a trainer makes in a training step,
// and the parts that serve them.
#include "core/engine/units/unit_engine.h"

#include <fmt/format.h>

#include "base/bytes.h"
#include "base/error.h"
#include "core/engine/state/residency_limits.h"

namespace ziggurat {

UnitEngine::UnitEngine(const ModelSpec& model, const EngineConfig& config, Runtime& runtime,
                       Device& device)
    : StateDoor(model, config, runtime, &device, TrainingState::Division::kModel) {}

void UnitEngine::open(const Initializer& initialize) {
  state_.runtime().reactor.block_on(opening(initialize));
}

Task<> UnitEngine::opening(const Initializer& initialize) {
  initialize_ = &initialize;
  Task<> its = state_.open(*this, nullptr, {});
  co_await std::move(its);
  initialize_ = nullptr;
}

void UnitEngine::open(StateSource& source, const LoadOptions& options) {
  open_state(*this, &source, options);
}

void UnitEngine::plan_device() {
  const Account device = state_.device().account();
  const std::uint64_t size_bytes = device.capacity_bytes() - device.used_bytes();
  device_plan_ = ziggurat::plan_device(state_.table(), state_.config().placement,
                                       state_.device_request(), size_bytes);
  require_device_budget(device_plan_, size_bytes);
}

Hand::Homes UnitEngine::make_homes(Context& context, const std::vector<StripePlace>& places) {
  auto params = UnitParamHome::create(context, places);
  auto grads =
      UnitGradHome::create(context, places, [this](std::uint64_t size_bytes, Purpose purpose) {
        return residency_->allocate(size_bytes, purpose);
      });
  params_ = params.get();
  grads_ = grads.get();
  return {.params = std::move(params), .grads = std::move(grads)};
}

Task<> UnitEngine::build() {
  calls_.emplace(state_.model());
  std::unique_ptr<UnitGather> gather;
  if (state_.table().sharding().params_sharded()) {
    Task<std::unique_ptr<UnitGather>> making = make_gather();
    gather = co_await std::move(making);
  }
  residency_ =
      Residency::create(state_.context(), *params_,
                        residency_limits(state_.config(), state_.table()), std::move(gather));
  flow_ = std::make_unique<GradientFlow>(
      state_.context(), *residency_, *grads_,
      GradientFlow::Most{device_plan_.accumulators, device_plan_.own_accumulators},
      state_.reduction());
}

/// Sets device memory for whole units aside, the same size on every rank.
Task<std::unique_ptr<UnitGather>> UnitEngine::make_gather() {
  const std::uint64_t everywhere = co_await state_.storage().quorum.min(device_plan_.live_bytes);
  DeviceBuffer region = state_.device().allocate(everywhere, Purpose::kParams);
  co_return std::make_unique<UnitGather>(state_.context(), *params_, std::move(region),
                                         state_.reduction());
}

bool UnitEngine::make_masters(ChunkId chunk, std::span<float> masters) const {
  const Chunk& its = state_.table().chunk(chunk);
  (*initialize_)(its.unit, its.begin, masters);
  return true;
}

void UnitEngine::opened() {
  const Sharding& ranks = state_.table().sharding();
  if (!ranks.optimizer_sharded() || ranks.params_sharded()) return;
  home_gather_ =
      std::make_unique<HomeGather>(state_.context(), *params_, *residency_, state_.generation());
}

/// In stages 1 and 2 the other ranks' parts must still be gathered.
void UnitEngine::updated(UnitId unit, std::uint64_t generation) {
  if (home_gather_) {
    home_gather_->slice_updated(unit, generation);
  } else {
    state_.gates().at_home(unit, generation);
  }
}

bool UnitEngine::in_step() const { return announced_.has_value() || (calls_ && calls_->in_step()); }

void UnitEngine::destroy_parts() {
  home_gather_.reset();
  flow_.reset();
  residency_.reset();
}

std::size_t UnitEngine::master_chunks(UnitId unit) const {
  require_unit("master_chunks", unit);
  return state_.table().unit(unit).chunk_count;
}

MasterChunk UnitEngine::read_master(UnitId unit, std::size_t chunk) {
  const Turn turn(turn_);
  require_unit("read_master", unit);
  const UnitChunks& chunks = state_.table().unit(unit);
  if (chunk >= chunks.chunk_count) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("read_master(unit {}, chunk {}): this rank updates only chunks 0 to {} "
                            "of the unit",
                            unit, chunk, chunks.chunk_count - 1));
  }
  const ChunkId id = chunks.first_chunk + static_cast<ChunkId>(chunk);
  return {.first = state_.table().chunk(id).begin, .values = run(state_.read_master(id))};
}

TypedDeviceSpan<const std::byte> UnitEngine::acquire(UnitId unit, StreamRef& stream) {
  const Turn turn(turn_);
  require_unit("acquire", unit);
  calls_->require_acquire(unit, state_.generation());
  require_waits(stream);
  const Residency::Acquired its = run(acquired(unit));
  try {
    const CountedTime waited(state_.runtime().reactor.clock(), state_.runtime().metrics,
                             Counter::kWaitParamsNs);
    wait_on(stream, its.landed);
  } catch (const Error& error) {
    calls_->released(unit);
    state_.runtime().reactor.post([this, unit] { residency_->release(unit, {}); });
    throw Error(
        error.code(),
        fmt::format(
            "acquire(unit {} '{}'): the unit's parameters ({}) did not reach the device: {}", unit,
            state_.model().units[unit].name, format_bytes(its.params.size()), error.what()),
        error.native());
  }
  return typed(unit, its.params);
}

Task<Residency::Acquired> UnitEngine::acquired(UnitId unit) {
  require_unit("acquire", unit);
  calls_->require_acquire(unit, state_.generation());
  state_.begin_call();
  Task<Residency::Acquired> acquiring =
      state_.ending_the_run(residency_->acquire(unit, Residency::Room::kWaitedFor));
  const Residency::Acquired its = co_await std::move(acquiring);
  calls_->acquired(unit, state_.generation());
  co_return its;
}

void UnitEngine::release(UnitId unit, StreamRef& stream) {
  const Turn turn(turn_);
  require_unit("release", unit);
  calls_->require_release(unit);
  const Event read = stream.record();
  calls_->released(unit);
  state_.runtime().reactor.post([this, unit, read] { residency_->release(unit, read); });
}

void UnitEngine::released(UnitId unit, const Event& read) {
  require_unit("release", unit);
  calls_->require_release(unit);
  calls_->released(unit);
  residency_->release(unit, read);
}

DeviceSpan<float> UnitEngine::gradient(UnitId unit, StreamRef& stream) {
  const Turn turn(turn_);
  require_unit("gradient", unit);
  calls_->require_gradient(unit);
  require_waits(stream);
  const CountedTime waited(state_.runtime().reactor.clock(), state_.runtime().metrics,
                           Counter::kWaitGradsNs);
  const GradientFlow::Accumulator its = run(accumulator(unit));
  wait_on(stream, its.zeroed);
  return its.values;
}

Task<GradientFlow::Accumulator> UnitEngine::accumulator(UnitId unit) {
  require_unit("gradient", unit);
  calls_->require_gradient(unit);
  Task<GradientFlow::Accumulator> taking = state_.ending_the_run(flow_->accumulator(unit));
  const GradientFlow::Accumulator its = co_await std::move(taking);
  calls_->has_gradient(unit);
  co_return its;
}

void UnitEngine::finish_gradient(UnitId unit, StreamRef& stream) {
  const Turn turn(turn_);
  require_unit("finish_gradient", unit);
  calls_->require_finish_gradient(unit);
  run(finished_gradient(unit, stream.record()));
}

Task<> UnitEngine::finished_gradient(UnitId unit, Event added) {
  require_unit("finish_gradient", unit);
  calls_->require_finish_gradient(unit);
  state_.begin_call();
  Task<> sending = state_.ending_the_run(send_gradient(unit, added));
  co_await std::move(sending);
  calls_->finished_gradient(unit);
}

Task<> UnitEngine::send_gradient(UnitId unit, Event added) {
  state_.check();
  co_await state_.context().compute->after(added);
  co_await clear_frozen(unit);
  // The others may have no gradient of it, and make no such call. Of a frozen unit none is sent.
  const UnitSpec& spec = state_.model().units[unit];
  const bool of_some = spec.optional && !spec.frozen() && !state_.table().sharding().one_rank();
  if (of_some) {
    flow_->keep(unit);
  } else {
    finish_now(unit);
  }
}

void UnitEngine::finish_now(UnitId unit) {
  const std::uint64_t making = state_.generation() + 1;
  flow_->finish(unit, making);
  residency_->params_may_change(unit);
  state_.sweep().gradient_started(unit, making, guess_ ? &*guess_ : nullptr);
}

Task<> UnitEngine::clear_frozen(UnitId unit) {
  if (state_.model().units[unit].constant()) co_return;  // nobody reads the gradient
  std::uint64_t begin = 0;
  for (const ParamSpec& param : state_.model().units[unit].params) {
    const std::uint64_t count = param.count();
    if (param.frozen) {
      const GradientFlow::Accumulator its = co_await flow_->accumulator(unit);
      const DeviceSpan<std::byte> frozen = its.values.subspan(begin, count).as<std::byte>();
      const Event cleared = co_await state_.context().compute->clear(frozen);
      co_await state_.context().compute->after(cleared);
    }
    begin += count;
  }
}

}  // namespace ziggurat
