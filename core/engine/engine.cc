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
#include "optimizer/gradient.h"
#include "tiers/record_hash.h"

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
    : model_(model), config_(config), runtime_(runtime), device_(device) {}

/// Everything that waits is failed, everything in flight is awaited, and then the floors go, upper
/// ones first.
EngineImpl::~EngineImpl() { runtime_.reactor.block_on(close()); }

Task<> EngineImpl::close() {
  const auto closed =
      std::make_exception_ptr(Error(ErrorCode::kCancelled, "the engine was closed"));
  // What make_durable() has waited for ends by itself, and others may still be in the last of its
  // calls; anything else has peers that would wait for it.
  if (tasks_ && tasks_->count() > 0 && !error_ && !at_rest_) tell_ranks(closed);
  fail_here(closed);
  if (tasks_) {
    try {
      co_await tasks_->wait_idle();
    } catch (const std::exception&) {
      // Reported when it happened, by the call that the trainer was in.
    }
  }
  sweep_.reset();
  home_gather_.reset();
  flow_.reset();
  cache_.reset();
  kept_.reset();
  records_.reset();
  grads_.reset();
  params_.reset();
  to_device_.reset();
  to_host_.reset();
  storage_.reset();  // the ring goes before the memory registered with it
  channels_.reset();
  pool_.reset();
}

void EngineImpl::fail(std::exception_ptr error) {
  if (error_) return;
  fail_here(error);
  // The rank that failed first tells the others why.
  if (!followed_from_another(error)) tell_ranks(error);
}

void EngineImpl::fail_here(const std::exception_ptr& error) {
  if (error_) return;
  error_ = error;
  if (cache_) cache_->fail(error);
  if (flow_) flow_->fail(error);
  if (sweep_) sweep_->fail(error);
  if (pool_) pool_->cancel_waiters(error);
}

TypedSpan<const std::byte> EngineImpl::acquire(UnitId unit) {
  at_rest_ = false;
  return runtime_.reactor.block_on(cache_->acquire(unit));
}

void EngineImpl::release(UnitId unit) {
  runtime_.reactor.post([this, unit] { cache_->release(unit); });
}

std::span<float> EngineImpl::gradient(UnitId unit) {
  const CountedTime waited(runtime_.metrics, Counter::kWaitGradsNs);
  return runtime_.reactor.block_on(flow_->accumulator(unit));
}

/// On the trainer's thread, which has nothing else to do meanwhile.
void EngineImpl::clear_frozen(UnitId unit) {
  std::span<float> values;
  std::uint64_t begin = 0;
  for (const ParamSpec& param : model_.units[unit].params) {
    const std::uint64_t count = param.count();
    if (param.frozen && values.empty()) values = gradient(unit);
    if (param.frozen) std::ranges::fill(values.subspan(begin, count), 0.0F);
    begin += count;
  }
}

void EngineImpl::finish_gradient(UnitId unit) {
  at_rest_ = false;
  clear_frozen(unit);
  runtime_.reactor.block_on([](EngineImpl& self, UnitId finished) -> Task<> {
    if (self.error_) std::rethrow_exception(self.error_);
    const std::uint64_t making = self.generation_ + 1;
    self.flow_->finish(finished, making);
    self.sweep_->gradient_started(finished, making, self.early_ ? &*self.early_ : nullptr);
    co_return;
  }(*this, unit));
}

/// Of every group, 0 first: that of parameters of none.
StepScalars EngineImpl::scalars(const StepOptions& options, float grad_scale) const {
  const OptimizerConfig& optimizer = config_.optimizer;
  OptimizerStep::Settings settings{.kind = optimizer.state.optimizer,
                                   .rounding = optimizer.rounding,
                                   .learning_rate = options.learning_rate,
                                   .beta1 = optimizer.beta1,
                                   .beta2 = optimizer.beta2,
                                   .eps = optimizer.eps,
                                   .weight_decay = optimizer.weight_decay,
                                   .grad_scale = grad_scale,
                                   .t = generation_ + 1,
                                   .seed = optimizer.rounding_seed};
  if (options.betas) {
    settings.beta1 = static_cast<float>(options.betas->beta1);
    settings.beta2 = static_cast<float>(options.betas->beta2);
  }
  for (const float beta : {settings.beta1, settings.beta2}) {
    if (beta >= 0 && beta < 1) continue;
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("step {}: beta {:g}: it must be at least 0 and less than 1", settings.t, beta));
  }
  StepScalars steps{OptimizerStep::make(settings)};
  for (const ParamGroup& group : config_.param_groups) {
    OptimizerStep::Settings own = settings;
    own.learning_rate = settings.learning_rate * group.lr_scale;
    own.beta1 = group.beta1.value_or(settings.beta1);
    own.beta2 = group.beta2.value_or(settings.beta2);
    own.eps = group.eps.value_or(settings.eps);
    own.weight_decay = group.weight_decay.value_or(settings.weight_decay);
    if (group.frozen) own.learning_rate = own.weight_decay = 0;
    steps.push_back(OptimizerStep::make(own));
    if (group.weight_decay && !group.frozen) steps.back().no_decay = steps.back().decay;
  }
  return steps;
}

/// Gradients are the sum over the ranks of each one's, times the loss scale; what is meant is the
/// mean. Divided in the step's scalars, so that no value is rounded once more.
double EngineImpl::gradient_divisor(const StepOptions& options) const {
  return static_cast<double>(options.loss_scale.value_or(1.0F)) *
         static_cast<double>(table_->sharding().total());
}

/// A guess can be taken back where the records of the generation before are still in their slots.
bool EngineImpl::may_speculate() const {
  const bool can = !records_->resident() && storage_->store->state().slots == 2;
  switch (config_.speculation) {
    case EngineConfig::Speculation::kNever: return false;
    case EngineConfig::Speculation::kAlways: return can;
    case EngineConfig::Speculation::kAuto: break;
  }
  return can && watch_.worth_it();
}

void EngineImpl::prepare_step(const StepOptions& options) {
  runtime_.reactor.block_on([](EngineImpl& self, const StepOptions& announced) -> Task<> {
    const bool certain = self.config_.clip_norm == 0 && !announced.loss_scale;
    if (!certain && !self.may_speculate()) co_return;
    const auto grad_scale = static_cast<float>(1.0 / self.gradient_divisor(announced));
    self.early_ = EarlyStep{.step = self.scalars(announced, grad_scale), .certain = certain};
    self.early_options_ = {.learning_rate = announced.learning_rate,
                           .betas = announced.betas,
                           .loss_scale = announced.loss_scale,
                           .blob = {}};
    co_return;
  }(*this, options));
}

StepResult EngineImpl::step(const StepOptions& options) {
  for (UnitId u = 0; u < model_.units.size(); ++u) {
    if (model_.units[u].frozen() && !flow_->finished(u)) finish_gradient(u);
  }
  return runtime_.reactor.block_on(finish_step(options));
}

Task<StepResult> EngineImpl::finish_step(const StepOptions& options) {
  {
    const CountedTime waited(runtime_.metrics, Counter::kWaitGradsNs);
    co_await flow_->all_arrived();
    co_await cache_->quiesce();
  }
  if (early_ &&
      (early_options_.learning_rate != options.learning_rate ||
       early_options_.betas != options.betas || early_options_.loss_scale != options.loss_scale)) {
    throw Error(ErrorCode::kInvalidArgument,
                "step() has another learning rate, other betas or another loss scale than "
                "prepare_step() announced");
  }
  if (options.loss_scale && !(*options.loss_scale > 0 && std::isfinite(*options.loss_scale))) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("step {}: a loss scale of {:g}", generation_ + 1, *options.loss_scale));
  }
  if (table_->sharding().ranks() > 1) co_await agree_on_step(options);
  const double divisor = gradient_divisor(options);
  const double norm = std::sqrt(flow_->norm().squared()) / divisor;
  const float coefficient = clip_coefficient(norm, config_.clip_norm);
  watch_.observe(coefficient == 1.0F && std::isfinite(norm));
  if (!std::isfinite(norm)) {
    if (!early_ || !early_->certain) co_await skip_step();
    if (options.loss_scale)
      co_return StepResult{.generation = generation_, .grad_norm = norm, .skipped = true};
    throw Error(ErrorCode::kUnavailable, fmt::format("the gradient norm of step {} is {}: nothing "
                                                     "was updated, generation {} stands; a lower "
                                                     "--lr or a longer --warmup may help",
                                                     generation_ + 1, norm, durable_generation()));
  }
  const StepScalars steps = scalars(options, static_cast<float>(coefficient / divisor));
  last_blob_ = wrap_blob(generation_ + 1, options.blob);
  sweep_->end_step(steps, last_blob_);
  ++generation_;
  early_.reset();
  flow_->begin_step();
  cache_->begin_generation(generation_);
  co_return StepResult{.generation = generation_, .grad_norm = norm, .clipped = coefficient < 1.0F};
}

/// The state is as before the step's first gradient.
Task<> EngineImpl::skip_step() {
  co_await sweep_->skip_step();
  early_.reset();
  flow_->begin_step();
  cache_->begin_generation(generation_);
}

std::uint64_t EngineImpl::durable_generation() const {
  return sweep_ ? sweep_->durable_generation() : 0;
}

void EngineImpl::make_durable() {
  const CountedTime waited(runtime_.metrics, Counter::kWaitDurableNs);
  runtime_.reactor.block_on([](EngineImpl& self) -> Task<> {
    if (self.error_) std::rethrow_exception(self.error_);
    co_await self.sweep_->settled();
    // Nothing stays under way in which other ranks take part.
    co_await self.cache_->quiesce();
    for (UnitId u = 0; u < self.table_->unit_count(); ++u) co_await self.cache_->wait_updated(u);
    if (self.records_->resident())
      co_await self.sweep_->checkpoint(self.generation_, self.last_blob_);
  }(*this));
  at_rest_ = true;
}

void EngineImpl::read_master(
    UnitId unit, const std::function<void(std::uint64_t, std::span<const float>)>& consume) {
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
  Lease lease = co_await state_lease(id);
  const std::span<std::byte> record = record_memory(id, lease.bytes());
  if (!records_->resident()) {
    const std::uint64_t stored = storage_->store->durable_generation();
    co_await storage_->store->read(id, stored, record);
    const StateStore::Expected expected = storage_->store->expected(id, stored);
    if (record_hash(record, expected.seed, table_->record_format()) != expected.hash)
      throw storage_->store->corrupt_record(id, stored);
  }
  values.resize(chunk.count);
  read_masters(table_->state().format, record, values);
}

std::vector<std::byte> EngineImpl::wrap_blob(std::uint64_t generation,
                                             std::span<const std::byte> blob) const {
  const BlobHeader header{.generation = generation};
  std::vector<std::byte> wrapped(sizeof(header) + blob.size());
  std::memcpy(wrapped.data(), &header, sizeof(header));
  if (!blob.empty()) std::memcpy(wrapped.data() + sizeof(header), blob.data(), blob.size());
  return wrapped;
}

std::vector<std::string> EngineImpl::description() const { return notes_; }

}  // namespace ziggurat
