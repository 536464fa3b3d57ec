// SPDX-License-Identifier: Apache-2.0
// core/engine/units/unit_step.cc: a training step from its announcement to its verdict.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "core/engine/state/step_agreement.h"
#include "core/engine/units/unit_engine.h"
#include "optimizer/gradient.h"

namespace ziggurat {

bool UnitEngine::may_guess() const {
  const OptimizerSweep& sweep = state_.sweep();
  switch (state_.config().speculation) {
    case EngineConfig::Speculation::kNever: return false;
    case EngineConfig::Speculation::kAlways: return sweep.can_guess();
    case EngineConfig::Speculation::kAuto: break;
  }
  return sweep.can_guess() && watch_.worth_it();
}

/// Begins a step with announced options. If `options` are invalid, step() says so, on every rank.
void UnitEngine::prepare_step(const StepOptions& options) {
  const Turn turn(turn_);
  run(announced(options));
}

Task<> UnitEngine::announced(const StepOptions& options) {
  state_.check();
  guess_.reset();
  announced_.reset();
  const bool sound = !state_.refusal_of(options);
  announced_ = options;
  announced_->blob = {};
  announced_groups_.assign(options.groups.begin(), options.groups.end());
  announced_->groups = announced_groups_;
  if (!sound || !may_guess()) co_return;
  guess_ = state_.scalars(options, static_cast<float>(1.0 / state_.gradient_divisor(options)));
}

StepResult UnitEngine::step(const StepOptions& options) {
  const Turn turn(turn_);
  return run(stepped(options));
}

Task<StepResult> UnitEngine::stepped(const StepOptions& options) {
  state_.require_blob_given("step()");
  if (options.checkpoint != nullptr) require_checkpoint(options);
  return finish_step(options);
}

void UnitEngine::require_checkpoint(const StepOptions& options) const {
  state_.require_saves("step()");
  if (!options.blob_follows) return;
  throw Error(ErrorCode::kInvalidArgument,
              "step(): a checkpoint has its step's blob, which must not follow the step then: give "
              "the blob with the step, or call save_checkpoint() after give_blob()");
}

/// Finishes the frozen units for which the trainer has not done it.
Task<> UnitEngine::finish_frozen() {
  const std::vector<UnitSpec>& units = state_.model().units;
  for (UnitId u = 0; u < units.size(); ++u) {
    if (!units[u].frozen() || flow_->finished(u)) continue;
    state_.begin_call();
    Task<> sending = send_gradient(u, Event());
    co_await state_.ending_the_run(std::move(sending));
    calls_->finished_gradient(u);
  }
}

/// Finishes the optional units that have a gradient on any rank, in the order of the model, on
/// every rank. The others are left out.
Task<> UnitEngine::settle_optional() {
  flow_->require_gradients();
  const std::vector<UnitSpec>& units = state_.model().units;
  if (std::ranges::none_of(units, &UnitSpec::optional)) co_return;
  std::exception_ptr lost;
  try {
    co_await residency_->quiesce();  // a unit that was kept may be on its way here again
    Task<std::vector<bool>> asking = have_gradients();
    const std::vector<bool> anywhere = co_await std::move(asking);
    for (UnitId u = 0; u < units.size(); ++u) {
      if (units[u].optional && !flow_->finished(u)) co_await finish_optional(u, anywhere[u]);
    }
  } catch (...) {
    lost = std::current_exception();
  }
  if (!lost) co_return;
  state_.fail(lost);  // the other ranks wait for this one
  std::rethrow_exception(lost);
}

/// Returns which units have a gradient on some rank.
Task<std::vector<bool>> UnitEngine::have_gradients() {
  Communicator& ranks = *state_.context().ranks.steps;
  const std::size_t units = state_.model().units.size();
  std::vector<std::byte> own(units);
  for (UnitId u = 0; u < units; ++u) own[u] = std::byte{flow_->kept(u) || flow_->finished(u)};
  std::vector<std::byte> all(own);
  if (ranks.world_size() > 1) {
    all.resize(units * static_cast<std::size_t>(ranks.world_size()));
    co_await ranks.all_gather(own, all);
  }
  std::vector<bool> anywhere(units);
  for (std::size_t i = 0; i < all.size(); ++i)
    anywhere[i % units] = anywhere[i % units] || all[i] != std::byte{0};
  co_return anywhere;
}

Task<> UnitEngine::finish_optional(UnitId unit, bool anywhere) {
  if (!anywhere) {
    co_await flow_->leave_out(unit);
    residency_->params_may_change(unit);
    state_.sweep().gradient_started(unit, state_.generation() + 1, nullptr);
    co_return;
  }
  if (!flow_->kept(unit)) {
    const GradientFlow::Accumulator zeros = co_await flow_->accumulator(unit);
    co_await state_.context().compute->after(zeros.zeroed);
  }
  finish_now(unit);
}

Task<StepResult> UnitEngine::finish_step(const StepOptions& options) {
  Metrics& metrics = state_.runtime().metrics;
  const Clock& clock = state_.runtime().reactor.clock();
  co_await finish_frozen();
  co_await settle_optional();
  {
    const CountedTime waited(clock, metrics, Counter::kWaitGradsNs);
    co_await flow_->all_arrived();
    co_await residency_->quiesce();
  }
  const StepVerdict verdict = co_await judged(options);
  const double norm = verdict.norm;
  const float coefficient = clip_coefficient(norm, state_.config().clip_norm);
  if (!verdict.refused) watch_.observe(coefficient == 1.0F && std::isfinite(norm));
  if (verdict.refused || !std::isfinite(norm)) {
    const std::uint64_t step = state_.generation() + 1;
    co_await undo_step();
    if (verdict.refused) throw not_made(step, *verdict.refused);
    if (options.loss_scale)
      co_return StepResult{.generation = step - 1, .grad_norm = norm, .skipped = true};
    throw Error(ErrorCode::kNotFinite,
                fmt::format("step {}: the gradient norm is {}; nothing was updated, and generation "
                            "{} is still current: skip the step, and if that happens often, lower "
                            "the learning rate or lengthen its warm-up",
                            step, norm, step - 1));
  }
  const double divisor = state_.gradient_divisor(options);
  const StepScalars steps = state_.scalars(options, static_cast<float>(coefficient / divisor));
  {
    const CountedTime waited(clock, metrics, Counter::kWaitDurableNs);
    co_await state_.checkpoint_ended();
  }
  state_.end_step(steps, options.blob, options.blob_follows, verdict.checkpoint);
  const bool saves = options.checkpoint != nullptr && verdict.saving == SaveState::kNone;
  if (saves) state_.begin_save(*options.checkpoint);
  co_return StepResult{.generation = state_.generation(),
                       .grad_norm = norm,
                       .clipped = coefficient < 1.0F,
                       .saves = saves};
}

/// Judges the step. Without a verdict the step can be neither made nor undone, so an error ends the
/// engine.
Task<StepVerdict> UnitEngine::judged(const StepOptions& options) {
  std::exception_ptr error;
  try {
    Task<StepVerdict> judging = judge_step(options);
    co_return co_await std::move(judging);
  } catch (...) {
    error = std::current_exception();
  }
  state_.fail(error);
  std::rethrow_exception(error);
}

Task<StepVerdict> UnitEngine::judge_step(const StepOptions& options) {
  std::optional<Error> refusal = state_.refusal_of(options);
  if (!refusal) refusal = refusal_of_announced(options);
  GradientNorm& norm = flow_->norm();
  norm.finish_message();
  const std::uint64_t order = residency_->take_order();
  std::memcpy(norm.message(state_.place().rank).data() + sizeof(StepFacts), &order, sizeof(order));
  StepFacts own = state_.facts(options);
  own.groups = groups_hash(options.groups);
  Task<StepVerdict> agreeing = state_.agree(own, refusal, norm.messages());
  StepVerdict verdict = co_await std::move(agreeing);
  if (!verdict.refused) verdict.refused = objection_to_gradients();
  if (verdict.refused) co_return verdict;
  double squared = 0;
  const std::function<void()> sum = [&] { squared = flow_->norm().squared(); };
  Runtime& runtime = state_.runtime();
  const Work work{.name = "sum norm", .bytes = norm.messages().size(), .decides = true};
  co_await runtime.jobs().run(runtime.reactor, work, sum);
  verdict.norm = std::sqrt(squared) / state_.gradient_divisor(options);
  co_return verdict;
}

/// Returns why the step cannot be made with what follows the facts in the ranks' messages: the
/// order in which each used the units, and its sums of squares.
std::optional<Error> UnitEngine::objection_to_gradients() const {
  const GradientNorm& norm = flow_->norm();
  const int own = state_.place().rank;
  const auto order_of = [&](int rank) {
    std::uint64_t order = 0;
    std::memcpy(&order, norm.message(rank).data() + sizeof(StepFacts), sizeof(order));
    return order;
  };
  static_assert(sizeof(StepFacts) + sizeof(std::uint64_t) <= GradientNorm::kHeadBytes);
  for (int rank = 0; rank < state_.table().sharding().ranks(); ++rank) {
    if (order_of(rank) == order_of(own)) continue;
    return Error(ErrorCode::kInvalidArgument,
                 fmt::format("rank {} used the units in another order than rank {}: every rank "
                             "must make the same calls",
                             rank, own));
  }
  const auto differs = norm.difference();
  if (!differs) return std::nullopt;
  return Error(
      ErrorCode::kUnavailable,
      fmt::format("unit {} ('{}'): the gradients of parameters that tensor-parallel ranks share "
                  "differ between ranks {} and {}. Use machines with the same CPU and the same "
                  "libraries in a tensor-parallel group, and check whether one of them is faulty",
                  differs->unit, state_.model().units[differs->unit].name, differs->first_rank,
                  differs->rank));
}

/// Says why a step's options are not those that were announced.
std::optional<Error> UnitEngine::refusal_of_announced(const StepOptions& options) const {
  if (!announced_ ||
      (announced_->learning_rate == options.learning_rate && announced_->betas == options.betas &&
       announced_->loss_scale == options.loss_scale &&
       std::ranges::equal(announced_->groups, options.groups)))
    return std::nullopt;
  return Error(
      ErrorCode::kInvalidArgument,
      "the learning rate, betas, groups or loss scale of step() differ from what prepare_step() "
      "announced: give both calls the same");
}

Task<> UnitEngine::undo_step() {
  std::exception_ptr failed;
  try {
    co_await state_.undo_step();
  } catch (...) {
    failed = std::current_exception();
  }
  if (!failed) co_return;
  calls_->ended_step();  // so that later calls throw the error with which the engine has ended
  std::rethrow_exception(failed);
}

void UnitEngine::begin_generation(std::uint64_t generation) {
  guess_.reset();
  announced_.reset();
  calls_->ended_step();
  flow_->begin_step();
  residency_->begin_generation(generation);
}

}  // namespace ziggurat
