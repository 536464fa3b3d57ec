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
    case StepRefusal::kLearningRate: return "its learning rate is not finite";
    case StepRefusal::kBetas: return "its betas are not in [0, 1)";
    case StepRefusal::kGroups: return "its groups of settings do not fit its model";
    case StepRefusal::kLossScale: return "its loss scale is not positive and finite";
    case StepRefusal::kBlob: return "its blob is larger than the store has room for";
    case StepRefusal::kAnnounced: return "its step() differs from its prepare_step()";
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
  const char* differs = nullptr;
  if (theirs.generation != own.generation) {
    differs = "makes another generation";
  } else if (theirs.options != own.options) {
    differs = "has another learning rate, other betas, other groups or another loss scale";
  } else if (theirs.order != own.order) {
    differs = "used the units in another order";
  }
  if (differs == nullptr) return {};
  return fmt::format("rank {} {} than rank {}: every rank must make the same calls", rank, differs,
                     own_rank);
}

}  // namespace ziggurat
