// SPDX-License-Identifier: Apache-2.0
// core/plan/strategies/rules.cc: the rules, those of arithmetic first.
#include "core/plan/strategies/rules.h"

#include <fmt/format.h>

namespace ziggurat {
namespace {

std::string arithmetic_refusal(const ModelShape& model, const ParallelLayout& layout) {
  if (model.heads % layout.tp != 0)
    return fmt::format("{} heads cannot be divided among {} tensor ranks", model.heads, layout.tp);
  if (model.latent.kv_rank == 0 && model.kv_heads % layout.tp != 0 &&
      layout.tp % model.kv_heads != 0) {
    return fmt::format("{} heads of keys and values cannot be divided among {} tensor ranks",
                       model.kv_heads, layout.tp);
  }
  if (layout.pp > model.layers)
    return fmt::format("{} layers cannot be divided among {} pipeline ranks", model.layers,
                       layout.pp);
  if (model.experts.count % layout.ep != 0 || layout.dp % layout.ep != 0) {
    return fmt::format("{} experts and {} data ranks cannot be divided among {} expert ranks",
                       model.experts.count, layout.dp, layout.ep);
  }
  if (layout.shard_group > 0 && layout.dp % layout.shard_group != 0)
    return fmt::format("{} data ranks cannot be divided into groups of {}", layout.dp,
                       layout.shard_group);
  if (layout.hpz > 0 && layout.dp % layout.hpz != 0)
    return fmt::format("{} data ranks cannot be divided into groups of {} for hpZ", layout.dp,
                       layout.hpz);
  return "";
}

std::string deepspeed_refusal(const ParallelLayout& layout) {
  if (layout.tp > 1 && layout.stage > 2)
    return "DeepSpeed's AutoTP works with ZeRO stages 0 to 2 only: choose stage 2 or tp 1";
  if (layout.pp > 1 && layout.stage > 1)
    return "DeepSpeed's PipelineModule works with ZeRO stages 0 and 1 only: choose stage 1 or pp 1";
  if (layout.params != Tier::kDevice && layout.stage < 3)
    return "DeepSpeed offloads parameters with ZeRO stage 3 only: choose stage 3";
  if (layout.optimizer == Tier::kNvme && layout.stage < 3)
    return "DeepSpeed offloads the optimizer to NVMe with ZeRO stage 3 only: choose stage 3 or "
           "the host";
  if (layout.optimizer != Tier::kDevice && layout.stage < 1)
    return "DeepSpeed offloads the optimizer with ZeRO stages 1 to 3 only: choose stage 1 or more";
  return "";
}

}  // namespace

std::string_view to_string(System system) noexcept {
  switch (system) {
    case System::kPyTorch: return "PyTorch";
    case System::kDeepSpeed: return "DeepSpeed";
    case System::kMegatron: return "Megatron";
    case System::kZiggurat: return "Ziggurat";
  }
  return "unknown";
}

std::string refusal_of(System system, const ModelShape& model, const ParallelLayout& layout) {
  std::string why = arithmetic_refusal(model, layout);
  if (!why.empty()) return why;
  if (system == System::kDeepSpeed) return deepspeed_refusal(layout);
  if (system == System::kMegatron && layout.stage > 1)
    return "Megatron divides the optimizer's state only: choose stage 1";
  if (system == System::kZiggurat && layout.pp > 1)
    return "Ziggurat has no pipeline ranks: choose pp 1";
  return "";
}

}  // namespace ziggurat
