// SPDX-License-Identifier: Apache-2.0
// core/sharding/strategy.cc: completes or refuses a strategy that was asked for.
#include "core/sharding/strategy.h"

#include <fmt/format.h>

#include "base/error.h"

namespace ziggurat {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

/// Returns the stage that a name stands for.
int stage_of(StrategyName name) noexcept { return name == StrategyName::kNone ? 0 : 3; }

void require_stage_fits(StrategyName name, int stage) {
  if (name == StrategyName::kHybrid) {
    if (stage == 0)
      refuse(
          "`strategy=hybrid` needs `zero_stage` 1, 2 or 3, because stage 0 divides nothing among "
          "the ranks of a group");
  } else if (stage != stage_of(name)) {
    refuse(fmt::format(
        "`strategy={0}` means `zero_stage={1}`, not {2}: leave out one of the two settings",
        to_string(name), stage_of(name), stage));
  }
}

int shard_group(const StrategyRequest& request, int stage, int dp) {
  if (request.name != StrategyName::kHybrid) {
    if (request.shard_group != 0)
      refuse(
          fmt::format("`shard_group={}` works only with `strategy=hybrid`: choose that strategy, "
                      "or leave `shard_group` out",
                      request.shard_group));
    return stage == 0 ? 1 : dp;
  }
  const int group = request.shard_group;
  if (group == 0)
    refuse(
        "`strategy=hybrid` needs `shard_group`, the number of ranks that share one copy of the "
        "state");
  if (group < 2 || dp % group != 0) {
    refuse(fmt::format(
        "`shard_group={0}` does not divide the {1} data-parallel ranks into groups of 2 or more: "
        "give a divisor of {1}, or `zero_stage=0`, which keeps a copy on every rank",
        group, dp));
  }
  return group;
}

}  // namespace

Strategy resolve(const StrategyRequest& request, int dp) {
  if (dp < 1) refuse(fmt::format("the run has {} data-parallel ranks: start at least 1", dp));
  const int stage =
      request.zero_stage.value_or(stage_of(request.name.value_or(StrategyName::kFull)));
  if (stage < 0 || stage > 3) refuse(fmt::format("`zero_stage={}`: give 0, 1, 2 or 3", stage));
  if (request.name) require_stage_fits(*request.name, stage);
  const Strategy strategy{.zero_stage = stage,
                          .keeps_params_to_backward = request.name == StrategyName::kGradOp,
                          .dp = dp,
                          .shard_group = shard_group(request, stage, dp),
                          .hpz = request.hpz};
  if (strategy.hpz == 0) return strategy;
  if (stage != 3) {
    refuse(
        fmt::format("`hpz={}` needs `zero_stage=3`, because it keeps a second copy of parameters "
                    "that only stage 3 divides; this run has {}",
                    strategy.hpz, to_string(Strategy{.zero_stage = stage, .dp = dp})));
  }
  if (strategy.hpz < 2 || strategy.hpz >= strategy.shard_group ||
      strategy.shard_group % strategy.hpz != 0) {
    refuse(
        fmt::format("`hpz={0}` does not divide the {1} ranks that share a copy of the state into "
                    "several groups of 2 or more: give a smaller divisor of {1}",
                    strategy.hpz, strategy.shard_group));
  }
  return strategy;
}

std::string to_string(const Strategy& strategy) {
  std::string text = fmt::format("stage {}", strategy.zero_stage);
  if (strategy.keeps_params_to_backward) text += " (grad-op)";
  if (strategy.is_hybrid()) text += fmt::format(" in groups of {}", strategy.shard_group);
  if (strategy.hpz > 0) text += fmt::format(", hpz {}", strategy.hpz);
  return text;
}

}  // namespace ziggurat
