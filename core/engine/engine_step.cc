// SPDX-License-Identifier: Apache-2.0
// core/engine/engine_step.cc: a training step from its announcement to its verdict.
//
// Updates may start during backward, before the step is known to be good. Until the verdict each of
// them can be taken back (core/schedule/optimizer/optimizer_sweep.h). So between the last gradient
// and the verdict no rank throws alone: an error is sent to all ranks, which then make the step
// together or undo it together.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/error.h"
#include "core/engine/engine_impl.h"
#include "core/engine/step_agreement.h"
#include "optimizer/gradient.h"

namespace ziggurat {

/// Returns one OptimizerStep for each parameter group. Group 0 has the parameters that are in no
/// group.
StepScalars EngineImpl::scalars(const StepOptions& options, float grad_scale) const {
  const OptimizerConfig& optimizer = config_.optimizer;
  const Betas betas = betas_of(options);
  OptimizerStep::Settings settings{.kind = optimizer.state.optimizer,
                                   .rounding = rounding_,
                                   .learning_rate = options.learning_rate,
                                   .beta1 = static_cast<float>(betas.beta1),
                                   .beta2 = static_cast<float>(betas.beta2),
                                   .eps = optimizer.eps,
                                   .weight_decay = optimizer.weight_decay,
                                   .grad_scale = grad_scale,
                                   .t = generation_ + 1,
                                   .seed = optimizer.rounding_seed};
  // If the noise depends on the parameter, it counts the parameter's own steps.
  if (!table_->rounding()) settings.rounding_step = generation_ + 1;
  if (!options.groups.empty()) return scalars_of(options.groups, settings);
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

/// Returns the steps for a trainer's own groups. Their settings apply to all their parameters.
StepScalars EngineImpl::scalars_of(std::span<const GroupStep> groups,
                                   OptimizerStep::Settings settings) {
  StepScalars steps;
  const float grad_scale = settings.grad_scale;
  const std::uint64_t generation = settings.t;
  for (const GroupStep& group : groups) {
    settings.learning_rate = group.learning_rate;
    settings.beta1 = group.beta1;
    settings.beta2 = group.beta2;
    settings.eps = group.eps;
    settings.weight_decay = group.weight_decay;
    settings.grad_scale = grad_scale * group.grad_scale;
    settings.t = group.steps == 0 ? generation : group.steps;
    settings.dampening = group.dampening;
    settings.nesterov = group.nesterov;
    settings.maximize = group.maximize;
    steps.push_back(OptimizerStep::make(settings));
    steps.back().no_decay = steps.back().decay;
    steps.back().params_written = group.params_written;
  }
  return steps;
}

Betas EngineImpl::betas_of(const StepOptions& options) const {
  return options.betas.value_or(Betas{.beta1 = static_cast<double>(config_.optimizer.beta1),
                                      .beta2 = static_cast<double>(config_.optimizer.beta2)});
}

/// Returns the number by which gradients are divided. They are the sum over the ranks, times the
/// loss scale, but the step needs the mean. The division is part of the step's scalars, so that no
/// value is rounded once more.
double EngineImpl::gradient_divisor(const StepOptions& options) const {
  return static_cast<double>(options.loss_scale.value_or(1.0F)) *
         static_cast<double>(table_->sharding().total());
}

bool EngineImpl::may_guess() const {
  switch (config_.speculation) {
    case EngineConfig::Speculation::kNever: return false;
    case EngineConfig::Speculation::kAlways: return sweep_->can_guess();
    case EngineConfig::Speculation::kAuto: break;
  }
  return sweep_->can_guess() && watch_.worth_it();
}

/// Begins a step with announced options. If `options` are invalid, step() says so, on every rank.
void EngineImpl::prepare_step(const StepOptions& options) {
  const Turn turn(turn_);
  require_not_lent("prepare_step()");
  runtime_.reactor.block_on([](EngineImpl& self, const StepOptions& announced) -> Task<> {
    self.cancel_.check();
    self.guess_.reset();
    self.announced_.reset();
    const bool sound = !self.refusal_of(announced);
    self.announced_ = announced;
    self.announced_->blob = {};
    self.announced_groups_.assign(announced.groups.begin(), announced.groups.end());
    self.announced_->groups = self.announced_groups_;
    if (!sound || !self.may_guess()) co_return;
    self.guess_ =
        self.scalars(announced, static_cast<float>(1.0 / self.gradient_divisor(announced)));
  }(*this, options));
}

StepResult EngineImpl::step(const StepOptions& options) {
  const Turn turn(turn_);
  require_not_lent("step() without gradients");
  if (options.checkpoint != nullptr) require_saves("step()");
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
  const StepVerdict verdict = co_await judged(options);
  const double norm = verdict.norm;
  const float coefficient = clip_coefficient(norm, config_.clip_norm);
  if (!verdict.refused) watch_.observe(coefficient == 1.0F && std::isfinite(norm));
  if (verdict.refused || !std::isfinite(norm)) {
    const std::uint64_t step = generation_ + 1;
    co_await undo_step();
    if (verdict.refused) throw not_made(step, *verdict.refused);
    if (options.loss_scale)
      co_return StepResult{.generation = generation_, .grad_norm = norm, .skipped = true};
    throw Error(ErrorCode::kNotFinite,
                fmt::format("step {}: the gradient norm is {}; nothing was updated, and generation "
                            "{} is still current: skip the step, and if that happens often, lower "
                            "the learning rate or lengthen its warm-up",
                            step, norm, generation_));
  }
  const double divisor = gradient_divisor(options);
  const StepScalars steps = scalars(options, static_cast<float>(coefficient / divisor));
  {
    const CountedTime waited(runtime_.metrics, Counter::kWaitDurableNs);
    co_await checkpoint_ended();
  }
  last_blob_ = wrap_blob(generation_ + 1, line_record_, options.blob);
  sweep_->end_step(steps, last_blob_);
  ++generation_;
  begin_step();
  if (verdict.checkpoint) begin_checkpoint();
  const bool saves = options.checkpoint != nullptr && verdict.saving == SaveState::kNone;
  if (saves) begin_save(*options.checkpoint);
  co_return StepResult{
      .generation = generation_, .grad_norm = norm, .clipped = coefficient < 1.0F, .saves = saves};
}

/// Judges the step. Without a verdict the step can be neither made nor undone, so an error ends the
/// engine.
Task<StepVerdict> EngineImpl::judged(const StepOptions& options) {
  std::exception_ptr error;
  try {
    Task<StepVerdict> judging = judge_step(options);
    co_return co_await std::move(judging);
  } catch (...) {
    error = std::current_exception();
  }
  fail(error);
  std::rethrow_exception(error);
}

Task<StepVerdict> EngineImpl::judge_step(const StepOptions& options) {
  const std::optional<Error> refusal = refusal_of(options);
  GradientNorm& norm = flow_->norm();
  norm.finish_message();
  const std::uint64_t order = cache_->take_order();
  std::memcpy(norm.message(place_.rank).data() + sizeof(StepFacts), &order, sizeof(order));
  StepFacts own = facts(options);
  own.groups = groups_hash(options.groups);
  Task<StepVerdict> agreeing = agree(own, refusal, norm.messages());
  StepVerdict verdict = co_await std::move(agreeing);
  if (!verdict.refused) verdict.refused = objection_to_gradients();
  if (verdict.refused) co_return verdict;
  double squared = 0;
  const std::function<void()> sum = [&] { squared = flow_->norm().squared(); };
  co_await runtime_.workers->run(runtime_.reactor, "sum norm", sum);
  verdict.norm = std::sqrt(squared) / gradient_divisor(options);
  co_return verdict;
}

StepFacts EngineImpl::facts(const StepOptions& options) const {
  return {.generation = generation_ + 1,
          .options = options_hash(options),
          .saving = save_state(),
          .checkpoint = checkpoint_due() ? 1U : 0U};
}

/// Exchanges `messages`, one of each rank, of one size and side by side, and judges the step by
/// their facts. Of this rank's message all but the facts is there. Either every rank finds an
/// objection, or none does.
Task<StepVerdict> EngineImpl::agree(StepFacts own, const std::optional<Error>& refusal,
                                    std::span<std::byte> messages) {
  if (refusal) own.refuse(*refusal);
  Communicator& ranks = *channels_->steps;
  const std::size_t message_bytes = messages.size() / static_cast<std::size_t>(ranks.world_size());
  const std::span<std::byte> message =
      messages.subspan(message_bytes * static_cast<std::size_t>(ranks.rank()), message_bytes);
  std::memcpy(message.data(), &own, sizeof(own));
  if (ranks.world_size() > 1) {
    const CountedTime waited(runtime_.metrics, Counter::kWaitRanksNs);
    co_await ranks.all_gather(message, messages);
  }
  const StepVerdict verdict =
      judgement(facts_of(messages, ranks.world_size()), ranks.rank(), refusal);
  // A checkpoint that one rank has given up cannot be completed, so no rank needs to wait for it.
  if (verdict.saving == SaveState::kGivenUp && saves_) saves_->give_up_with_others();
  co_return verdict;
}

/// Returns why the step cannot be made with what follows the facts in the ranks' messages: the
/// order in which each used the units, and its sums of squares.
std::optional<Error> EngineImpl::objection_to_gradients() {
  const GradientNorm& norm = flow_->norm();
  const auto order_of = [&](int rank) {
    std::uint64_t order = 0;
    std::memcpy(&order, norm.message(rank).data() + sizeof(StepFacts), sizeof(order));
    return order;
  };
  static_assert(sizeof(StepFacts) + sizeof(std::uint64_t) <= GradientNorm::kHeadBytes);
  for (int rank = 0; rank < table_->sharding().ranks(); ++rank) {
    if (order_of(rank) == order_of(place_.rank)) continue;
    return Error(ErrorCode::kInvalidArgument,
                 fmt::format("rank {} used the units in another order than rank {}: every rank "
                             "must make the same calls",
                             rank, place_.rank));
  }
  const auto differs = norm.difference();
  if (!differs) return std::nullopt;
  return Error(
      ErrorCode::kUnavailable,
      fmt::format("unit {} ('{}'): the gradients of parameters that tensor-parallel ranks share "
                  "differ between ranks {} and {}. Use machines with the same CPU and the same "
                  "libraries in a tensor-parallel group, and check whether one of them is faulty",
                  differs->unit, model_.units[differs->unit].name, differs->first_rank,
                  differs->rank));
}

/// Returns why this rank will not make a step with `options`; none if it will.
std::optional<Error> EngineImpl::refusal_of(const StepOptions& options) const {
  const auto refused = [](const std::string& why) {
    return Error(ErrorCode::kInvalidArgument, why);
  };
  if (!std::isfinite(options.learning_rate)) {
    return refused(
        fmt::format("the learning rate is {}: give a finite number", options.learning_rate));
  }
  const Betas betas = betas_of(options);
  for (const double beta : {betas.beta1, betas.beta2}) {
    if (beta >= 0 && static_cast<float>(beta) < 1) continue;
    return refused(
        fmt::format("the betas are {:g} and {:g}: each must be at least 0 and less than 1",
                    betas.beta1, betas.beta2));
  }
  if (!groups_fit(options)) return refused(groups_text(options));
  const float scale = options.loss_scale.value_or(1.0F);
  if (!(scale > 0 && std::isfinite(scale)))
    return refused(fmt::format("the loss scale is {:g}: give a positive, finite number", scale));
  if (const std::optional<Error> blob = refusal_of_blob(options.blob)) return blob;
  if (announced_ &&
      (announced_->learning_rate != options.learning_rate || announced_->betas != options.betas ||
       announced_->loss_scale != options.loss_scale ||
       !std::ranges::equal(announced_->groups, options.groups))) {
    return refused(
        "the learning rate, betas, groups or loss scale of step() differ from what prepare_step() "
        "announced: give both calls the same");
  }
  return std::nullopt;
}

std::optional<Error> EngineImpl::refusal_of_blob(std::span<const std::byte> blob) const {
  if (blob.size() <= blob_bytes_max()) return std::nullopt;
  return Error(ErrorCode::kInvalidArgument,
               fmt::format("the blob has {} bytes, but the store has room for only {}", blob.size(),
                           blob_bytes_max()));
}

bool EngineImpl::makes_step(const GroupStep& group) const {
  const auto beta = [](float value) { return value >= 0 && value < 1; };
  const bool sgd = config_.optimizer.state.optimizer == OptimizerKind::kSgd;
  return std::isfinite(group.learning_rate) && beta(group.beta1) && beta(group.beta2) &&
         group.eps >= 0 && std::isfinite(group.eps) && std::isfinite(group.weight_decay) &&
         std::isfinite(group.grad_scale) && std::isfinite(group.dampening) &&
         (sgd || (group.dampening == 0 && !group.nesterov));
}

/// Whether every parameter has the settings of a group, and all settings are valid.
bool EngineImpl::groups_fit(const StepOptions& options) const {
  if (options.groups.empty()) return !config_.param_groups.empty() || group_count_ <= 1;
  return config_.param_groups.empty() && options.groups.size() == group_count_ &&
         std::ranges::all_of(options.groups, [&](const GroupStep& g) { return makes_step(g); });
}

std::string EngineImpl::groups_text(const StepOptions& options) const {
  if (!config_.param_groups.empty()) {
    return fmt::format(
        "{} groups of settings were given, but `param_groups` defines them already: give none to a "
        "step",
        options.groups.size());
  }
  if (options.groups.size() != group_count_) {
    return fmt::format(
        "{} groups of settings were given, but the model has {}: give settings for each group",
        options.groups.size(), group_count_);
  }
  const auto bad =
      std::ranges::find_if(options.groups, [&](const GroupStep& g) { return !makes_step(g); });
  const auto index = static_cast<std::size_t>(bad - options.groups.begin());
  const std::string whose =
      is_lent() ? fmt::format("'{}'", model_.units[index].name) : fmt::format("group {}", index);
  return fmt::format(
      "no step can be made with the settings of {}: learning rate {:g}, betas {:g} and {:g}, eps "
      "{:g}, decay {:g}, gradient scale {:g}, dampening {:g}{}: give finite numbers, betas in [0, "
      "1) and an eps of at least 0; only sgd may have dampening and nesterov",
      whose, bad->learning_rate, bad->beta1, bad->beta2, bad->eps, bad->weight_decay,
      bad->grad_scale, bad->dampening, bad->nesterov ? ", nesterov" : "");
}

/// Undoes the step, so that the state is as before the step's first gradient. If that fails, the
/// engine ends and does not give out any state.
Task<> EngineImpl::undo_step() {
  std::exception_ptr cause;
  try {
    co_await sweep_->undo_step();
  } catch (...) {
    cause = std::current_exception();
  }
  if (!cause) {
    begin_step();
    co_return;
  }
  calls_->ended_step();  // so that later calls throw the error with which the engine has ended
  const std::exception_ptr error = std::make_exception_ptr(undo_failed(cause));
  tell_ranks(error);
  cancel_.cancel(error);
  ended_ = true;
  std::rethrow_exception(error);
}

Error EngineImpl::undo_failed(const std::exception_ptr& cause) const {
  ErrorCode code = ErrorCode::kDataLoss;
  std::string why = "unknown";
  try {
    std::rethrow_exception(cause);
  } catch (const Error& error) {
    code = error.code();
    why = error.what();
  } catch (const std::exception& error) {
    why = error.what();
  }
  return {code,
          fmt::format("step {} was begun and could not be undone: {}. The state in memory is now a "
                      "mixture of two generations, so this engine has ended. Generation {} is "
                      "undamaged in {}: close this engine and open the store again",
                      generation_ + 1, why, durable_generation(), storage_->paths())};
}

/// Begins the step that makes generation_ + 1.
void EngineImpl::begin_step() {
  guess_.reset();
  announced_.reset();
  calls_->ended_step();
  if (flow_) flow_->begin_step();
  gates_->begin_generation(generation_);
  if (cache_) cache_->begin_generation(generation_);
}

/// Returns the largest blob that a step may have, without the engine's own header. A store of an
/// earlier version has no room for the header, so it holds that much less.
std::uint64_t EngineImpl::blob_bytes_max() const {
  if (!storage_->store) return config_.blob_bytes_max;
  const std::uint64_t head_bytes = line_record_ ? kBlobHeadBytes : sizeof(BlobHeader);
  return std::min(config_.blob_bytes_max, storage_->store->blob_capacity_bytes() - head_bytes);
}

}  // namespace ziggurat
