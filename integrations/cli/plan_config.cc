// SPDX-License-Identifier: Apache-2.0
// integrations/cli/plan_config.cc: what is recommended as a config that DeepSpeed, `ziggurat train`
// and ziggurat.deepspeed read, and what such a config cannot say.
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "base/error.h"
#include "core/plan/strategies/words.h"
#include "integrations/cli/plan_strategies.h"
#include "integrations/cli/settings.h"

namespace ziggurat::cli {
namespace {

/// Refuses what lies on NVMe if nobody has said where that is.
void require_nvme_path(const StrategiesCommand& command, const Verdict& best) {
  const ParallelLayout& layout = best.training.layout;
  if (layout.params != Tier::kNvme && layout.optimizer != Tier::kNvme) return;
  if (!command.nvme_path.empty()) return;
  throw UsageError(fmt::format(
      "{} is recommended, which keeps state on NVMe: give its folder with --nvme-path", best.name));
}

}  // namespace

DeepSpeedConfig deepspeed_config(const StrategiesCommand& command, const Verdict& best) {
  const Training& training = best.training;
  const ParallelLayout& layout = training.layout;
  if (layout.tp > 1 || layout.pp > 1 || layout.ep > 1 || layout.shard_group > 0 ||
      layout.keeps_gathered) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} is recommended, which this kind of config cannot say; set it up in "
                            "{} itself",
                            best.name, to_string(best.system)));
  }
  require_nvme_path(command, best);
  nlohmann::json zero{{"stage", layout.stage}};
  const auto home = [&](Tier tier) -> nlohmann::json {
    if (tier == Tier::kNvme) return {{"device", "nvme"}, {"nvme_path", command.nvme_path}};
    return {{"device", "cpu"}, {"pin_memory", true}};
  };
  if (layout.params != Tier::kDevice) zero["offload_param"] = home(layout.params);
  if (layout.optimizer != Tier::kDevice) zero["offload_optimizer"] = home(layout.optimizer);
  if (layout.hpz > 0) zero["zero_hpz_partition_size"] = layout.hpz;
  if (layout.quantized) zero["zero_quantized_weights"] = zero["zero_quantized_gradients"] = true;
  nlohmann::json config{{"train_micro_batch_size_per_gpu", command.job.micro_batch},
                        {"gradient_accumulation_steps", training.micro_batches},
                        {"bf16", {{"enabled", true}}},
                        {"zero_optimization", std::move(zero)}};
  if (training.recompute == Recompute::kFull)
    config["activation_checkpointing"] = {{"partition_activations", false},
                                          {"cpu_checkpointing", training.offloads_activations}};
  DeepSpeedConfig made{config.dump(2) + "\n", {}};
  if (training.recompute == Recompute::kFull)
    made.script_must.emplace_back(
        "compute each layer again in backward: model.gradient_checkpointing_enable() in "
        "Transformers, or deepspeed.checkpointing.checkpoint() around each layer, which alone "
        "reads the block activation_checkpointing");
  if (training.recompute == Recompute::kSelective)
    made.script_must.emplace_back(
        "compute norms and activation functions again in backward: selective activation "
        "checkpointing, torch.utils.checkpoint with create_selective_checkpoint_contexts()");
  if (training.software.loss_tokens > 0)
    made.script_must.push_back(
        fmt::format("compute the loss in chunks of {} tokens, or by a fused kernel that never has "
                    "all logits",
                    grouped(training.software.loss_tokens)));
  if (training.offloads_activations)
    made.script_must.emplace_back(
        "keep the inputs of layers in host memory: cpu_checkpointing with "
        "deepspeed.checkpointing.checkpoint(), or torch.autograd.graph.save_on_cpu()");
  return made;
}

}  // namespace ziggurat::cli
