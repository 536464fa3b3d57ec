// SPDX-License-Identifier: Apache-2.0
// core/engine/engine.cc: a training step, as the trainer calls it. Opening is in engine_open.cc.
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

std::unique_ptr<Engine> Engine::open(const ModelSpec& model, const EngineConfig& config,
                                     Runtime& runtime, Device& device,
                                     const Initializer& initialize) {
  auto engine = std::make_unique<EngineImpl>(model, config, runtime, device);
  engine->open(initialize);
  return engine;
}

EngineImpl::EngineImpl(const ModelSpec& model, const EngineConfig& config, Runtime& runtime,
                       Device& device)
    : model_(model),
      config_(config),
      runtime_(runtime),
      device_(device),
      cancel_(runtime.reactor),
      stored_(cancel_) {}

/// Everything that waits is failed, everything in flight is awaited, and then the floors go, upper
/// ones first.
EngineImpl::~EngineImpl() { runtime_.reactor.block_on(close()); }

Task<> EngineImpl::close() {
  const auto closed =
      std::make_exception_ptr(Error(ErrorCode::kCancelled, "the engine was closed"));
  // What make_durable() has waited for ends by itself, and others may still be in the last of its
  // calls; anything else has peers that would wait for it, and so has a step that never ends.
  if (awaited_by_ranks() && !cancel_.cancelled() && !at_rest_) tell_ranks(closed);
  if (service_) co_await service_->close(agreements_);
  if (!cancel_.cancelled()) cancel_.cancel(closed);
  if (tasks_) {
    try {
      co_await tasks_->wait_idle();
    } catch (const std::exception&) {
      // Reported when it happened, by the call that the trainer was in.
    }
  }
  service_.reset();
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
  storage_.reset();  // the ring goes before the memory registered with it
  channels_.reset();
  pool_.reset();
}

/// Something is under way in which others take part. Lent gradients are none of it, nor records in
/// memory.
bool EngineImpl::awaited_by_ranks() const {
  if (is_lent() && records_ && !records_->through_store()) return storing_;
  return (tasks_ && tasks_->count() > 0) || (sweep_ && sweep_->step_open());
}

/// From now on every call throws `error`; what waits is woken with it.
void EngineImpl::fail(std::exception_ptr error) {
  if (cancel_.cancelled()) return;
  cancel_.cancel(error);
  // The rank that failed first tells the others why.
  if (!followed_from_another(error)) tell_ranks(error);
}

/// The trainer's call: a device that it finds lost ends the run, and the other ranks learn why.
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

TypedDeviceSpan<const std::byte> EngineImpl::acquire(UnitId unit) {
  calls_->require_acquire(unit, generation_);
  at_rest_ = false;
  const TypedDeviceSpan<const std::byte> params =
      runtime_.reactor.block_on(ending_the_run(cache_->acquire(unit)));
  calls_->acquired(unit, generation_);
  return params;
}

void EngineImpl::release(UnitId unit) {
  calls_->require_release(unit);
  calls_->released(unit);
  runtime_.reactor.post([this, unit] { cache_->release(unit); });
}

DeviceSpan<float> EngineImpl::gradient(UnitId unit) {
  require_not_lent("gradient()");
  calls_->require_gradient(unit);
  const DeviceSpan<float> values = accumulator(unit);
  calls_->has_gradient(unit);
  return values;
}

DeviceSpan<float> EngineImpl::accumulator(UnitId unit) {
  const CountedTime waited(runtime_.metrics, Counter::kWaitGradsNs);
  return runtime_.reactor.block_on(ending_the_run(flow_->accumulator(unit)));
}

void EngineImpl::clear_frozen(UnitId unit) {
  if (table_->model().units[unit].constant()) return;  // nobody looks at it
  DeviceSpan<float> values;
  std::uint64_t begin = 0;
  for (const ParamSpec& param : model_.units[unit].params) {
    const std::uint64_t count = param.count();
    if (param.frozen && values.empty()) values = accumulator(unit);
    if (param.frozen) {
      const DeviceSpan<std::byte> frozen = values.subspan(begin, count).as<std::byte>();
      runtime_.reactor.block_on(ending_the_run(compute_->clear(frozen)));
    }
    begin += count;
  }
}

void EngineImpl::finish_gradient(UnitId unit) {
  require_not_lent("finish_gradient()");
  calls_->require_finish_gradient(unit);
  at_rest_ = false;
  clear_frozen(unit);
  runtime_.reactor.block_on([](EngineImpl& self, UnitId finished) -> Task<> {
    self.cancel_.check();
    const std::uint64_t making = self.generation_ + 1;
    self.flow_->finish(finished, making);
    self.cache_->params_may_change(finished);
    self.sweep_->gradient_started(finished, making, self.guess_ ? &*self.guess_ : nullptr);
    co_return;
  }(*this, unit));
  calls_->finished_gradient(unit);
}

void EngineImpl::read_master(
    UnitId unit, const std::function<void(std::uint64_t, std::span<const float>)>& consume) {
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
  // Where the newest generation is durable, what stays in memory may be a guess at the next one.
  const bool sealed = records_->through_store() && durable_generation() == generation_;
  const bool stored = sealed || !records_->stays(id);
  const bool fetched = !stored && records_->updated_on_device(id);
  Lease lease;
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
