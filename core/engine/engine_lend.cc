// SPDX-License-Identifier: Apache-2.0
// core/engine/engine_lend.cc: steps of a trainer that lends its parameters and gradients.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "base/error.h"
#include "base/numerics/typed_value.h"
#include "core/engine/engine_impl.h"
#include "core/engine/step_agreement.h"
#include "core/engine/store_rounding.h"
#include "tiers/host_device.h"

namespace ziggurat {

namespace {

std::unique_ptr<EngineImpl> unopened(const ModelSpec& model, EngineConfig config, Runtime& runtime,
                                     std::span<const TypedSpan<std::byte>> params) {
  config.placement.params = config.placement.grads = Tier::kTrainer;
  // The trainer judges a step before anything is updated, so there is nothing to guess.
  config.speculation = EngineConfig::Speculation::kNever;
  auto device = HostDevice::create(runtime.reactor, kKiB * 4, runtime.trace.get());
  return std::make_unique<EngineImpl>(model, config, runtime, std::move(device), params);
}

}  // namespace

std::unique_ptr<LentEngine> LentEngine::open(const ModelSpec& model, EngineConfig config,
                                             Runtime& runtime,
                                             std::span<const TypedSpan<std::byte>> params) {
  auto engine = unopened(model, std::move(config), runtime, params);
  engine->open({});
  return engine;
}

std::unique_ptr<LentEngine> LentEngine::open(const ModelSpec& model, EngineConfig config,
                                             Runtime& runtime,
                                             std::span<const TypedSpan<std::byte>> params,
                                             StateSource& source, const LoadOptions& options) {
  auto engine = unopened(model, std::move(config), runtime, params);
  engine->open(source, options);
  return engine;
}

EngineImpl::EngineImpl(const ModelSpec& model, const EngineConfig& config, Runtime& runtime,
                       std::unique_ptr<Device> device, std::span<const TypedSpan<std::byte>> lent)
    : model_(model),
      config_(config),
      runtime_(runtime),
      own_device_(std::move(device)),
      device_(*own_device_),
      cancel_(runtime.reactor),
      lent_memory_(runtime.reactor, cancel_),
      lent_params_(lent.begin(), lent.end()),
      stored_(cancel_) {}

void EngineImpl::validate_lent() {
  const auto require = [](bool good, const std::string& message) {
    if (!good) throw Error(ErrorCode::kInvalidArgument, message);
  };
  require(config_.resume != EngineConfig::Resume::kReshard,
          "`resume=reshard` cannot be used with lent parameters, because only the trainer knows "
          "their pieces: open the store with the ranks that made it, and load their state dicts "
          "with other ranks");
  require(config_.clip_norm == 0,
          fmt::format("`clip={}` cannot be used with lent gradients, because their trainer clips "
                      "them itself: leave this setting out",
                      config_.clip_norm));
  require(config_.param_groups.empty(),
          "`param_groups` cannot be used with lent parameters: give each step its groups instead");
  require(!config_.placement.automatic && config_.placement.optimizer != Tier::kDevice &&
              config_.placement.device_record_bytes == 0,
          fmt::format("`placement={}` cannot be used with lent parameters: keep optimizer state on "
                      "host or nvme",
                      to_string(config_.placement)));
  require(!config_.store.empty() || config_.placement.optimizer == Tier::kHost,
          "`store` is missing: give a directory, because optimizer state is not on the host");
  require(lent_params_.size() == model_.units.size(),
          fmt::format("{} parameters are lent, but the model has {} units: lend one for each",
                      lent_params_.size(), model_.units.size()));
  const std::vector<std::uint64_t>& firsts = config_.first_elements;
  require(firsts.empty() || firsts.size() == model_.units.size(),
          fmt::format(
              "`first_elements` has {} numbers, but the model has {} parameters: give one for each",
              firsts.size(), model_.units.size()));
  for (std::size_t u = 0; u < firsts.size(); ++u)
    model_.units[u].params[0].first_element = firsts[u];
  for (std::size_t u = 0; u < model_.units.size(); ++u) {
    const UnitSpec& unit = model_.units[u];
    const DType dtype = unit.dtype.value_or(model_.dtype);
    const TypedSpan<std::byte>& lent = lent_params_[u];
    require(
        lent.dtype == dtype && lent.count() == unit.count(),
        fmt::format("unit '{}': {} elements of {} are lent, but the unit has {} of {}", unit.name,
                    lent.count(), to_string(lent.dtype), unit.count(), to_string(dtype)));
    require_compatible(config_.optimizer.state.format, param_rounding(config_.optimizer),
                       dtype == DType::kBFloat16);
  }
}

/// Throws for a `call` that only a trainer makes whose parameters and gradients are in the engine's
/// memory.
void EngineImpl::require_not_lent(const char* call) const {
  if (!is_lent()) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} cannot be called, because the trainer of this engine lends its "
                          "parameters and gradients: read the parameters where they are, and give "
                          "the gradients to step()",
                          call));
}

/// Throws unless `unit` has `count` elements.
void EngineImpl::require_lent(UnitId unit, const char* call, std::uint64_t count) const {
  calls_->require_unit(call, unit);
  const UnitSpec& its = model_.units[unit];
  if (count == its.count()) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}('{}'): {} elements were given, but the unit has {}", call, its.name,
                          count, its.count()));
}

/// Makes the masters of a chunk in a new store from the lent parameters.
void EngineImpl::widen_params(ChunkId id, std::span<float> masters) const {
  const Chunk& chunk = table_->chunk(id);
  const TypedSpan<std::byte> params = lent_params_[chunk.unit].subspan(chunk.begin, masters.size());
  for (std::size_t i = 0; i < masters.size(); ++i)
    masters[i] = value_at(params.dtype, params.bytes.data(), i);
}

void EngineImpl::lend_params(UnitId unit, TypedSpan<std::byte> params) {
  const Turn turn(turn_);
  require_lent(unit, "lend_params", params.count());
  if (const DType dtype = table_->dtype(unit); params.dtype != dtype) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("lend_params('{}'): the parameter is {}, but the memory is {}",
                            model_.units[unit].name, to_string(dtype), to_string(params.dtype)));
  }
  run_lent([](EngineImpl& self, UnitId of, auto lent) -> Task<> {
    co_await self.gates_->wait(of);
    self.params_->lend(of, lent);
  }(*this, unit, params));
}

void EngineImpl::check() {
  if (!ended_) return;
  const Turn turn(turn_);
  run_lent([](EngineImpl& self) -> Task<> {
    self.cancel_.check();
    co_return;
  }(*this));
}

void EngineImpl::expect_gradients() {
  const Turn turn(turn_);
  run_lent([](EngineImpl& self) -> Task<> {
    self.cancel_.check();
    self.at_rest_ = false;
    self.sweep_->gradient_started(0, self.generation_ + 1, nullptr);
    co_return;
  }(*this));
}

void EngineImpl::wait_updated(UnitId unit) {
  const Turn turn(turn_);
  calls_->require_unit("wait_updated", unit);
  run_lent([](EngineImpl& self, UnitId of) -> Task<> {
    self.cancel_.check();
    co_await self.gates_->wait(of);
  }(*this, unit));
}

void EngineImpl::wait_all_updated() {
  const Turn turn(turn_);
  run_lent([](EngineImpl& self) -> Task<> {
    self.cancel_.check();
    co_await self.gates_->wait_all();
  }(*this));
}

StepResult EngineImpl::step(std::span<const TypedSpan<const std::byte>> gradients,
                            const StepOptions& options) {
  const Turn turn(turn_);
  return run_lent(finish_lent_step(gradients, options));
}

void EngineImpl::refuse_step(const Error& why) {
  const Turn turn(turn_);
  run_lent([](EngineImpl& self, const Error& its) -> Task<> {
    self.cancel_.check();
    co_await self.agree_on_lent_step({.blob = {}}, its);
  }(*this, why));
}

/// Returns why this rank will not make the step; none if it will.
std::optional<Error> EngineImpl::lent_refusal(std::span<const TypedSpan<const std::byte>> gradients,
                                              const StepOptions& options) const {
  if (gradients.size() != model_.units.size()) {
    return Error(ErrorCode::kInvalidArgument,
                 fmt::format("{} gradients were given for {} units: give one for each",
                             gradients.size(), model_.units.size()));
  }
  try {
    require_blob_given("step()");
    for (UnitId u = 0; u < gradients.size(); ++u) {
      if (!gradients[u].bytes.empty()) require_lent(u, "step", gradients[u].count());
    }
  } catch (const Error& error) {
    return error;
  }
  if (const std::optional<Error> refusal = refusal_of(options)) return refusal;
  const bool some_left_out =
      std::ranges::any_of(gradients, [](const auto& gradient) { return gradient.bytes.empty(); });
  const bool counted = table_->rounding() && config_.param_steps;
  const bool drawn = drawn_by(table_->state().format, rounding_).param;
  if (!some_left_out || !drawn || counted || holds_param(table_->state().format))
    return std::nullopt;
  return Error(
      ErrorCode::kUnimplemented,
      "some parameters have no gradient in this step, but parameters are rounded stochastically "
      "and nobody counts their steps. The store would round them differently when it is opened "
      "again: make a new store, or choose `param_rounding=nearest`");
}

/// Agrees with the other ranks on the step: either all make it, or none does and each throws.
/// Returns whether the step is to be stored, which rank 0 decides. Without a verdict the engine has
/// ended.
Task<bool> EngineImpl::agree_on_lent_step(const StepOptions& options,
                                          const std::optional<Error>& refusal) {
  require_all_open("step()");
  ++agreements_;
  agreeing_ = true;
  // Each trainer decides groups and gradients for its own parameters, so nothing follows the facts.
  std::vector<StepFacts> all(static_cast<std::size_t>(channels_->steps->world_size()));
  StepVerdict verdict;
  std::exception_ptr lost;
  try {
    Task<StepVerdict> agreeing =
        agree(facts(options), refusal, std::as_writable_bytes(std::span(all)));
    verdict = co_await std::move(agreeing);
  } catch (...) {
    lost = std::current_exception();
  }
  agreeing_ = false;
  if (lost) {
    fail(lost);
    std::rethrow_exception(lost);
  }
  if (verdict.refused) throw not_made(generation_ + 1, *verdict.refused);
  co_return verdict.checkpoint;
}

/// Makes a step. No update starts before the trainers of all ranks have agreed to the step, so none
/// is ever undone.
Task<StepResult> EngineImpl::finish_lent_step(std::span<const TypedSpan<const std::byte>> gradients,
                                              const StepOptions& options) {
  cancel_.check();
  const std::optional<Error> refusal = lent_refusal(gradients, options);
  const bool checkpoint = co_await agree_on_lent_step(options, refusal);
  at_rest_ = false;
  // The gradients of the previous step are in use until all units are updated.
  co_await gates_->wait_all();
  co_await checkpoint_ended();
  for (UnitId u = 0; u < table_->unit_count(); ++u) grads_->lend(u, gradients[u]);
  sweep_->gradient_started(0, generation_ + 1, nullptr);
  for (ChunkId id = 0; id < table_->chunks().size(); ++id) grads_->arrived(id).set();
  const StepScalars steps = scalars(options, static_cast<float>(1.0 / gradient_divisor(options)));
  last_blob_ = wrap_blob(generation_ + 1, line_record_, options.blob);
  take_counts(gradients, options.blob);
  blob_awaited_ = options.blob_follows;
  sweep_->end_step(steps, blob_awaited_ ? std::nullopt : std::optional(last_blob_));
  ++generation_;
  if (service_) service_->made(generation_);
  begin_step();
  checkpoint_awaits_ = checkpoint && blob_awaited_;
  if (checkpoint && !blob_awaited_) begin_checkpoint();
  if (options.update_at_once) co_await updated_from_memory();
  co_return StepResult{.generation = generation_,
                       .grad_norm = std::numeric_limits<double>::quiet_NaN()};
}

/// Takes each parameter's count of steps from the step's blob, because a run that resumes will take
/// it from there. The trainer may have set other counts than follow from the steps made. If a
/// unit's count has changed and no gradient of this step rounds its parameters, they are made again
/// from its masters.
void EngineImpl::take_counts(std::span<const TypedSpan<const std::byte>> gradients,
                             std::span<const std::byte> blob) {
  if (own_steps_.empty()) return;
  const std::vector<std::uint64_t> before = std::exchange(own_steps_, config_.param_steps(blob));
  ZIGGURAT_CHECK(own_steps_.size() == before.size(), "{} counts of steps for {} parameters",
                 own_steps_.size(), before.size());
  if (!drawn_by(table_->state().format, rounding_).param) return;
  for (UnitId u = 0; u < before.size(); ++u) {
    if (!gradients[u].bytes.empty() || own_steps_[u] == before[u]) continue;
    const UnitChunks& chunks = table_->unit(u);
    for (ChunkId id = chunks.first_chunk; id < chunks.first_chunk + chunks.chunk_count; ++id)
      writes_->round_again(id);
  }
}

/// Returns when all units whose records are in memory are updated.
Task<> EngineImpl::updated_from_memory() {
  const auto in_memory = [&](UnitId u) {
    const UnitChunks& chunks = table_->unit(u);
    const ChunkId last = chunks.first_chunk + chunks.chunk_count - 1;
    return records_->stays(chunks.first_chunk) && records_->stays(last);
  };
  for (UnitId u = 0; u < table_->unit_count(); ++u)
    if (in_memory(u)) co_await gates_->wait(u);
}

void EngineImpl::require_blob_given(const char* call) const {
  if (!blob_awaited_) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format(
          "{} was called while generation {} still waits for its blob: call give_blob() first",
          call, generation_));
}

void EngineImpl::give_blob(std::span<const std::byte> blob) {
  const Turn turn(turn_);
  if (!blob_awaited_) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("give_blob(): generation {} does not wait for a blob: say in that "
                            "step's options that a blob follows",
                            generation_));
  }
  if (const std::optional<Error> refusal = refusal_of_blob(blob)) throw Error(*refusal);
  run_lent([](EngineImpl& self, std::span<const std::byte> given) -> Task<> {
    self.cancel_.check();
    self.last_blob_ = wrap_blob(self.generation_, self.line_record_, given);
    self.blob_awaited_ = false;
    self.sweep_->give_blob(self.last_blob_);
    if (std::exchange(self.checkpoint_awaits_, false)) self.begin_checkpoint();
    co_return;
  }(*this, blob));
}

}  // namespace ziggurat
