// SPDX-License-Identifier: Apache-2.0
// core/engine/engine.cc: the calls that a trainer makes in a training step. Opening is in
// engine_open.cc.
#include "core/engine/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/bytes.h"
#include "base/check.h"
#include "base/error.h"
#include "core/engine/engine_impl.h"
#include "core/schedule/stored_record.h"
#include "optimizer/gradient.h"

namespace ziggurat {
namespace {

/// Throws, before anything changes, if `stream` may not wait for events.
void refuse_unfit(StreamRef& stream) { stream.wait(Event()); }

bool is_lost_store(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const StoreLost&) {
    return true;
  } catch (...) {
  }
  return false;
}

}  // namespace

std::unique_ptr<Engine> Engine::open(const ModelSpec& model, const EngineConfig& config,
                                     Runtime& runtime, Device& device,
                                     const Initializer& initialize) {
  if (auto resharded = EngineImpl::reshard(model, config, runtime, device)) return resharded;
  auto engine = std::make_unique<EngineImpl>(model, config, runtime, device);
  engine->open(initialize);
  return engine;
}

std::unique_ptr<Engine> Engine::open(const ModelSpec& model, const EngineConfig& config,
                                     Runtime& runtime, Device& device, StateSource& source,
                                     const LoadOptions& options) {
  if (auto resharded = EngineImpl::reshard(model, config, runtime, device)) return resharded;
  auto engine = std::make_unique<EngineImpl>(model, config, runtime, device);
  engine->open(source, options);
  return engine;
}

EngineImpl::EngineImpl(const ModelSpec& model, const EngineConfig& config, Runtime& runtime,
                       Device& device)
    : model_(model),
      config_(config),
      runtime_(runtime),
      device_(device),
      cancel_(runtime.reactor),
      lent_memory_(runtime.reactor, cancel_),
      stored_(cancel_) {}

/// Ends the engine: everything that waits fails, everything in flight is awaited, and then the
/// parts are destroyed, those that use others first.
EngineImpl::~EngineImpl() { runtime_.reactor.block_on(close()); }

Task<> EngineImpl::close() {
  const auto closed =
      std::make_exception_ptr(Error(ErrorCode::kCancelled, "the engine was closed"));
  // After make_durable() the other ranks need nothing more from this rank, and may still be in the
  // last of its exchanges. In every other state they would wait for this rank forever, as in a step
  // that never ends, so they are told.
  if (awaited_by_ranks() && !cancel_.cancelled() && !at_rest_) tell_ranks(closed);
  if (service_) co_await service_->close(agreements_);
  if (!cancel_.cancelled()) cancel_.cancel(closed);
  if (tasks_) {
    try {
      co_await tasks_->wait_idle();
    } catch (const std::exception&) {
      // The call that the trainer was in has reported the error.
    }
  }
  service_.reset();
  saves_.reset();
  sweep_.reset();
  home_gather_.reset();
  flow_.reset();
  cache_.reset();
  staging_.reset();
  records_.reset();
  grads_.reset();
  params_.reset();
  to_device_.reset();
  compute_.reset();
  to_host_.reset();
  storage_.reset();  // the ring is destroyed before the memory that is registered with it
  channels_.reset();
  pool_.reset();
}

/// Whether other ranks wait for this rank: an exchange is under way, or a step was begun in which
/// they will wait. Lent gradients and records in memory are not exchanged.
bool EngineImpl::awaited_by_ranks() const {
  if (is_lent() && records_ && !records_->through_store()) return storing_;
  if ((tasks_ && tasks_->count() > 0) || (sweep_ && sweep_->step_open())) return true;
  return announced_.has_value() || (calls_ && calls_->in_step());
}

/// Makes every later call throw `error`, and wakes everything that waits.
void EngineImpl::fail(std::exception_ptr error) {
  if (cancel_.cancelled()) return;
  cancel_.cancel(error);
  ended_ = true;
  // The rank that failed first tells the others why. All ranks know already that a store is lost.
  if (!followed_from_another(error) && !is_lost_store(error)) tell_ranks(error);
}

/// Runs a call of the trainer. If the call finds that the device is lost, the run ends, and the
/// other ranks are told why.
template <class T>
Task<T> EngineImpl::ending_the_run(Task<T> call) {
  std::exception_ptr error;
  try {
    co_return co_await std::move(call);
  } catch (const Error& failure) {
    error = std::current_exception();
    if (failure.code() != ErrorCode::kUnavailable) std::rethrow_exception(error);
  }
  fail(error);
  std::rethrow_exception(error);
}

/// Makes `stream` wait for an event. The host waits on the reactor, like all calls of the engine,
/// so that a lost device ends the run.
void EngineImpl::wait_on(StreamRef& stream, const Event& event) {
  if (dynamic_cast<Host*>(&stream) == nullptr) return stream.wait(event);
  runtime_.reactor.block_on(ending_the_run(event.wait()));
}

TypedDeviceSpan<const std::byte> EngineImpl::acquire(UnitId unit, StreamRef& stream) {
  const Turn turn(turn_);
  require_not_lent("acquire()");
  calls_->require_acquire(unit, generation_);
  refuse_unfit(stream);
  at_rest_ = false;
  const ParamCache::Acquired acquired =
      runtime_.reactor.block_on(ending_the_run(cache_->acquire(unit)));
  try {
    const CountedTime waited(runtime_.metrics, Counter::kWaitParamsNs);
    wait_on(stream, acquired.landed);
  } catch (const Error& error) {
    runtime_.reactor.post([this, unit] { cache_->release(unit, {}); });
    throw Error(
        error.code(),
        fmt::format(
            "acquire(unit {} '{}'): the unit's parameters ({}) did not reach the device: {}", unit,
            model_.units[unit].name, format_bytes(acquired.params.bytes.size()), error.what()),
        error.native());
  }
  calls_->acquired(unit, generation_);
  return acquired.params;
}

void EngineImpl::release(UnitId unit, StreamRef& stream) {
  const Turn turn(turn_);
  calls_->require_release(unit);
  const Event read = stream.record();
  calls_->released(unit);
  runtime_.reactor.post([this, unit, read] { cache_->release(unit, read); });
}

DeviceSpan<float> EngineImpl::gradient(UnitId unit, StreamRef& stream) {
  const Turn turn(turn_);
  require_not_lent("gradient()");
  calls_->require_gradient(unit);
  refuse_unfit(stream);
  const CountedTime waited(runtime_.metrics, Counter::kWaitGradsNs);
  const GradientFlow::Accumulator its =
      runtime_.reactor.block_on(ending_the_run(flow_->accumulator(unit)));
  wait_on(stream, its.zeroed);
  calls_->has_gradient(unit);
  return its.values;
}

void EngineImpl::finish_gradient(UnitId unit, StreamRef& stream) {
  const Turn turn(turn_);
  require_not_lent("finish_gradient()");
  calls_->require_finish_gradient(unit);
  const Event added = stream.record();
  at_rest_ = false;
  runtime_.reactor.block_on(ending_the_run(send_gradient(unit, added)));
  calls_->finished_gradient(unit);
}

/// Sends the gradient on its way after `added`: then the trainer has added everything to the
/// accumulator.
Task<> EngineImpl::send_gradient(UnitId unit, Event added) {
  cancel_.check();
  co_await compute_->after(added);
  co_await clear_frozen(unit);
  const std::uint64_t making = generation_ + 1;
  flow_->finish(unit, making);
  cache_->params_may_change(unit);
  sweep_->gradient_started(unit, making, guess_ ? &*guess_ : nullptr);
}

Task<> EngineImpl::clear_frozen(UnitId unit) {
  if (table_->model().units[unit].constant()) co_return;  // nobody reads the gradient
  std::uint64_t begin = 0;
  for (const ParamSpec& param : model_.units[unit].params) {
    const std::uint64_t count = param.count();
    if (param.frozen) {
      const GradientFlow::Accumulator its = co_await flow_->accumulator(unit);
      const DeviceSpan<std::byte> frozen = its.values.subspan(begin, count).as<std::byte>();
      const Event cleared = co_await compute_->clear(frozen);
      co_await compute_->after(cleared);
    }
    begin += count;
  }
}

void EngineImpl::read_master(
    UnitId unit, const std::function<void(std::uint64_t, std::span<const float>)>& consume) {
  const Turn turn(turn_);
  calls_->require_unit("read_master", unit);
  runtime_.reactor.block_on(sweep_->settled());
  const UnitChunks& chunks = table_->unit(unit);
  for (ChunkId id = chunks.first_chunk; id < chunks.first_chunk + chunks.chunk_count; ++id) {
    std::vector<float> values;
    runtime_.reactor.block_on(read_master_chunk(id, values));
    const std::uint64_t begin = table_->chunk(id).begin;
    if (const std::uint64_t real = table_->real_count(id); real > 0)
      consume(begin, std::span<const float>(values).first(real));
  }
}

Task<> EngineImpl::read_master_chunk(ChunkId id, std::vector<float>& values) {
  const Chunk& chunk = table_->chunk(id);
  // If the newest generation is durable, the record in memory may be, or may become, a guess at the
  // next one.
  const bool sealed = records_->through_store() && durable_generation() == generation_;
  const bool stored = sealed || !records_->holds(id, generation_);
  const bool fetched = !stored && records_->updated_on_device(id);
  Lease lease;
  if (stored && !storage_->store) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("read_master(unit {}): the unit is frozen, and an engine without "
                            "`store` keeps no masters of frozen units",
                            chunk.unit));
  }
  if (stored || fetched) lease = co_await state_lease(id, chunk.record_bytes());
  if (stored) {
    const std::uint64_t generation =
        chunk.constant ? storage_->store->durable_generation() : sweep_->stored_in(id);
    co_await read_record(*context_, *storage_->store, id, generation, lease.bytes());
  } else if (fetched) {
    co_await records_->fetch(id, lease.bytes());
  }
  const std::span<const std::byte> record =
      lease ? std::span<const std::byte>(lease.bytes()) : records_->memory(id);
  const std::function<void()> job = [&] {
    values.resize(chunk.count);
    read_masters(table_->state_format(id), record, values);
  };
  co_await runtime_.workers->run(runtime_.reactor, "read masters", job);
}

std::vector<std::string> EngineImpl::description() const { return notes_; }

}  // namespace ziggurat
