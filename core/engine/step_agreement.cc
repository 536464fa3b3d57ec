// SPDX-License-Identifier: Apache-2.0
// core/engine/step_agreement.cc: the messages for a step that a rank refuses.
#include "core/engine/step_agreement.h"

#include <fmt/format.h>

#include <span>

#include "base/checksum.h"

namespace ziggurat {

const char* to_string(StepRefusal refusal) {
  switch (refusal) {
    case StepRefusal::kNone: break;
    case StepRefusal::kLearningRate: return "the learning rate is not finite";
    case StepRefusal::kBetas: return "the betas are not in [0, 1)";
    case StepRefusal::kGroups: return "the groups of settings do not fit the model";
    case StepRefusal::kLossScale: return "the loss scale is not positive and finite";
    case StepRefusal::kBlob: return "the blob is larger than the store has room for";
    case StepRefusal::kAnnounced: return "step() has other options than prepare_step()";
  }
  return "nothing";
}

std::uint64_t options_hash(const StepOptions& options) {
  const Betas betas = options.betas.value_or(Betas{});
  std::string text = fmt::format("{} {} {} {} {} {}", options.learning_rate,
                                 options.betas.has_value(), betas.beta1, betas.beta2,
                                 options.loss_scale.has_value(), options.loss_scale.value_or(0.0F));
  text += options.checkpoint != nullptr ? " saved" : "";
  for (const GroupStep& group : options.groups) {
    text +=
        fmt::format(" {} {} {} {} {} {} {} {}", group.learning_rate, group.beta1, group.beta2,
                    group.eps, group.weight_decay, group.dampening, group.nesterov, group.maximize);
  }
  return hash64(std::as_bytes(std::span(text)), 0);
}

std::optional<std::string> objection(const StepFacts& theirs, int rank, const StepFacts& own,
                                     int own_rank) {
  if (theirs.refusal != StepRefusal::kNone)
    return fmt::format("rank {} refused the step: {}", rank, to_string(theirs.refusal));
  if (theirs.generation != own.generation) {
    return fmt::format(
        "rank {} makes another generation than rank {}: every rank must make the same calls", rank,
        own_rank);
  }
  if (theirs.options != own.options) {
    return fmt::format(
        "rank {} has another learning rate, other betas, other groups or another loss scale than "
        "rank {}: every rank must make the same calls",
        rank, own_rank);
  }
  if (theirs.order != own.order) {
    return fmt::format(
        "rank {} used the units in another order than rank {}: every rank must make the same calls",
        rank, own_rank);
  }
  return {};
}

}  // namespace ziggurat
