// SPDX-License-Identifier: Apache-2.0
// core/engine/state/state_step.cc: what every step has, whoever trains: its scalars, the ranks'
// agreement, and its end or its undoing.
//
// Updates may start before the step is known to be good. Until the verdict each of them can be
// taken back (core/schedule/optimizer/optimizer_sweep.h). So between the last gradient and the
// verdict no rank throws alone: an error is sent to all ranks, which then make the step together or
// undo it together.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "core/engine/state/step_agreement.h"
#include "core/engine/state/training_state.h"

namespace ziggurat {
namespace {

std::uint64_t step_of(const GroupStep& group, std::uint64_t generation) {
  return group.steps == 0 ? generation : group.steps;
}
/// The learning rate of a group in the step that makes `generation`.
float rate_of(const GroupStep& group, std::uint64_t generation) {
  const auto before = static_cast<float>(step_of(group, generation) - 1);
  return group.learning_rate / (1.0F + before * group.lr_decay);
}

}  // namespace

StepScalars TrainingState::scalars(const StepOptions& options, float grad_scale) const {
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
StepScalars TrainingState::scalars_of(std::span<const GroupStep> groups,
                                      OptimizerStep::Settings settings) {
  StepScalars steps;
  const float grad_scale = settings.grad_scale;
  const std::uint64_t generation = settings.t;
  for (const GroupStep& group : groups) {
    settings.t = step_of(group, generation);
    settings.learning_rate = rate_of(group, generation);
    settings.beta1 = group.beta1;
    settings.beta2 = group.beta2;
    settings.eps = group.eps;
    settings.weight_decay = group.weight_decay;
    settings.grad_scale = grad_scale * group.grad_scale;
    settings.dampening = group.dampening;
    settings.nesterov = group.nesterov;
    settings.maximize = group.maximize;
    steps.push_back(OptimizerStep::make(settings));
    steps.back().no_decay = steps.back().decay;
    steps.back().params_written = group.params_written;
  }
  return steps;
}

Betas TrainingState::betas_of(const StepOptions& options) const {
  return options.betas.value_or(Betas{.beta1 = static_cast<double>(config_.optimizer.beta1),
                                      .beta2 = static_cast<double>(config_.optimizer.beta2)});
}

double TrainingState::gradient_divisor(const StepOptions& options) const {
  return static_cast<double>(options.loss_scale.value_or(1.0F)) *
         static_cast<double>(table_->sharding().total());
}

StepFacts TrainingState::facts(const StepOptions& options) const {
  return {.generation = generation_ + 1,
          .options = options_hash(options),
          .saving = save_state(),
          .checkpoint = checkpoint_due() ? 1U : 0U};
}

Task<StepVerdict> TrainingState::agree(StepFacts own, const std::optional<Error>& refusal,
                                       std::span<std::byte> messages) {
  if (refusal) own.refuse(*refusal);
  Communicator& ranks = *channels_->steps;
  const std::size_t message_bytes = messages.size() / static_cast<std::size_t>(ranks.world_size());
  const std::span<std::byte> message =
      messages.subspan(message_bytes * static_cast<std::size_t>(ranks.rank()), message_bytes);
  std::memcpy(message.data(), &own, sizeof(own));
  if (ranks.world_size() > 1) {
    const CountedTime waited(runtime_.reactor.clock(), runtime_.metrics, Counter::kWaitRanksNs);
    co_await ranks.all_gather(message, messages);
  }
  const std::vector<StepFacts> all = facts_of(messages, ranks.world_size());
  std::vector<RefusalWords> words;
  if (ranks.world_size() > 1 && any_refuses(all)) {  // on every rank alike
    words.resize(all.size());
    RefusalWords& mine = words[static_cast<std::size_t>(ranks.rank())];
    mine = words_of(refusal);
    co_await ranks.all_gather(std::as_bytes(std::span(mine)),
                              std::as_writable_bytes(std::span(words)));
  }
  const StepVerdict verdict = judgement(all, words, ranks.rank(), refusal);
  // A checkpoint that one rank has given up cannot be completed, so no rank needs to wait for it.
  if (verdict.saving == SaveState::kGivenUp && saves_) saves_->give_up_with_others();
  co_return verdict;
}

std::optional<Error> TrainingState::refusal_of(const StepOptions& options) const {
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
  return refusal_of_blob(options.blob);
}

std::optional<Error> TrainingState::refusal_of_blob(std::span<const std::byte> blob) const {
  if (blob.size() <= blob_bytes_max()) return std::nullopt;
  const std::size_t own =
      config_.counts_steps ? StepsBlob::read(blob, stored_count()).own.size() : blob.size();
  return Error(ErrorCode::kInvalidArgument,
               fmt::format("the blob has {} bytes, but the store has room for only {}", own,
                           blob_bytes_max() - (blob.size() - own)));
}

bool TrainingState::makes_step(const GroupStep& group) const {
  const auto beta = [](float value) { return value >= 0 && value < 1; };
  const bool momentum = info_of(config_.optimizer.state.optimizer).has_momentum;
  return std::isfinite(rate_of(group, generation_ + 1)) && beta(group.beta1) && beta(group.beta2) &&
         group.eps >= 0 && std::isfinite(group.eps) && std::isfinite(group.weight_decay) &&
         std::isfinite(group.grad_scale) && std::isfinite(group.dampening) &&
         (momentum || (group.dampening == 0 && !group.nesterov));
}

/// Whether every parameter has the settings of a group, and all settings are valid.
bool TrainingState::groups_fit(const StepOptions& options) const {
  if (options.groups.empty()) return !config_.param_groups.empty() || group_count_ <= 1;
  return config_.param_groups.empty() && options.groups.size() == group_count_ &&
         std::ranges::all_of(options.groups, [&](const GroupStep& g) { return makes_step(g); });
}

std::string TrainingState::groups_text(const StepOptions& options) const {
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
  std::string whose = fmt::format("group {}", index);
  for (const LentPlace& its : lent_places_) {  // a trainer that lends thinks of its parameters
    const ParamSpec& param = model_.units[its.unit].params[its.param];
    if (param.group != index) continue;
    whose = fmt::format("'{}'", param.name);
    break;
  }
  return fmt::format(
      "no step can be made with the settings of {}: learning rate {:g}, betas {:g} and {:g}, eps "
      "{:g}, decay {:g}, gradient scale {:g}, dampening {:g}{}: give finite numbers, betas in [0, "
      "1) and an eps of at least 0; only sgd may have dampening and nesterov",
      whose, rate_of(*bad, generation_ + 1), bad->beta1, bad->beta2, bad->eps, bad->weight_decay,
      bad->grad_scale, bad->dampening, bad->nesterov ? ", nesterov" : "");
}

void TrainingState::end_step(const StepScalars& steps, std::span<const std::byte> blob,
                             bool blob_follows, bool checkpoint) {
  last_blob_ = wrap_blob(generation_ + 1, line_record_, blob);
  blob_awaited_ = blob_follows;
  sweep_->end_step(steps, blob_awaited_ ? std::nullopt : std::optional(last_blob_));
  ++generation_;
  if (service_) service_->made(generation_);
  begin_generation();
  checkpoint_awaits_ = checkpoint && blob_awaited_;
  if (checkpoint && !blob_awaited_) begin_checkpoint();
}

/// Begins the step that makes generation_ + 1.
void TrainingState::begin_generation() {
  gates_->begin_generation(generation_);
  hand_->begin_generation(generation_);
}

Task<> TrainingState::undo_step() {
  std::exception_ptr cause;
  try {
    co_await sweep_->undo_step();
  } catch (...) {
    cause = std::current_exception();
  }
  if (!cause) {
    begin_generation();
    co_return;
  }
  const std::exception_ptr error = std::make_exception_ptr(undo_failed(cause));
  end_by(error);
  std::rethrow_exception(error);
}

Error TrainingState::undo_failed(const std::exception_ptr& cause) const {
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

void TrainingState::require_blob_given(const char* call) const {
  if (!blob_awaited_) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format(
          "{} was called while generation {} still waits for its blob: call give_blob() first",
          call, generation_));
}

void TrainingState::require_blob(std::span<const std::byte> blob) const {
  if (!blob_awaited_) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("give_blob(): generation {} does not wait for a blob: say in that "
                            "step's options that a blob follows",
                            generation_));
  }
  if (const std::optional<Error> refusal = refusal_of_blob(blob)) throw Error(*refusal);
}

void TrainingState::give_blob(std::span<const std::byte> blob) {
  cancel_.check();
  last_blob_ = wrap_blob(generation_, line_record_, blob);
  blob_awaited_ = false;
  sweep_->give_blob(last_blob_);
  if (std::exchange(checkpoint_awaits_, false)) begin_checkpoint();
}

/// Returns the largest blob that a step may have, without the engine's own header. A store of an
/// earlier version has no room for the header, so it holds that much less.
std::uint64_t TrainingState::blob_bytes_max() const {
  if (!storage_->store) return blob_room_bytes();
  const std::uint64_t head_bytes = line_record_ ? kBlobHeadBytes : sizeof(BlobHeader);
  return std::min(blob_room_bytes(), storage_->store->blob_capacity_bytes() - head_bytes);
}

}  // namespace ziggurat
