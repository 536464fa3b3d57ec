// SPDX-License-Identifier: Apache-2.0
// core/sharding/strategy.h: over how many ranks each class of state is cut, and how long gathered
// parameters live. Arithmetic only.
//
// ZeRO's stages (Rajbhandari et al. 2020, section 5) say what is cut: nothing (0), the optimizer's
// state (1), gradients too (2), parameters too (3). FSDP's names say the same and one thing more:
//
//   full      stage 3: parameters are gathered for each use and dropped after it
//   grad-op   stage 3 with parameters gathered once, for forward, and kept to backward's end
//   none      stage 0: every rank has everything
//   hybrid    a stage (3 unless said) within shard groups of G ranks; the groups are replicas
//
// In stage 1 a rank keeps its slice of the gradients too: there is no whole gradient to keep
// (core/sharding/shard.h).
//
// hpZ (Wang et al. 2023, ZeRO++, section 4.2) is not a hybrid: stage 3 over all ranks, and a second
// cut of the 16-bit parameters over P ranks of a node, from which backward gathers.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace ziggurat {

enum class StrategyName : std::uint8_t { kFull, kGradOp, kNone, kHybrid };
/// In the order of StrategyName.
inline constexpr std::array<std::string_view, 4> kStrategyNames{"full", "grad-op", "none",
                                                                "hybrid"};
constexpr std::string_view to_string(StrategyName name) noexcept {
  return kStrategyNames[static_cast<std::size_t>(name)];
}

/// As asked for: what is not given follows from the rest.
struct StrategyRequest {
  std::optional<int> zero_stage = std::nullopt;
  std::optional<StrategyName> name = std::nullopt;
  int shard_group = 0;  ///< hybrid's G; 0: not given
  int hpz = 0;          ///< ranks that have a second cut among them; 0: none
};

/// What it comes to on `dp` data-parallel ranks.
struct Strategy {
  int zero_stage = 3;
  bool keeps_params_to_backward = false;  ///< grad-op
  int dp = 1;
  int shard_group = 1;  ///< ranks that state is cut over: dp, or a hybrid's G
  int hpz = 0;          ///< 0: no second cut

  /// Ranks over which a class is cut at rest; 1: each has all of it.
  int param_shards() const noexcept { return zero_stage == 3 ? shard_group : 1; }
  /// Over how many ranks gradients and optimizer state are cut.
  int update_shards() const noexcept { return zero_stage >= 1 ? shard_group : 1; }
  /// Equal slices that a unit is padded to; a class cut over fewer ranks keeps several of them.
  int slices() const noexcept { return zero_stage == 0 ? dp : shard_group; }
  /// Groups that hold the same state.
  int replicas() const noexcept { return dp / shard_group; }
  /// A sharding smaller than the world.
  bool is_hybrid() const noexcept { return zero_stage > 0 && replicas() > 1; }
};
/// "stage 3", "stage 2 (grad-op)", "stage 3 in groups of 8", "stage 3, hpz 8".
std::string to_string(const Strategy& strategy);

/// Errors: kInvalidArgument, naming the flags, for what contradicts itself (strategy none at stage
/// 3, a shard group without hybrid, ..) or does not divide `dp`, with the arithmetic.
Strategy resolve(const StrategyRequest& request, int dp);

}  // namespace ziggurat
