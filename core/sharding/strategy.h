// SPDX-License-Identifier: Apache-2.0
// core/sharding/strategy.h: how many ranks divide each class of state, and how long gathered
// parameters live. Arithmetic only.
//
// ZeRO's stages (Rajbhandari et al. 2020, section 5) say what is divided: nothing (0), the
// optimizer's state (1), gradients too (2), parameters too (3). FSDP's names stand for stages and
// groups, and say how long parameters are kept:
//
//   full      stage 3: parameters are gathered for each use and dropped after it
//   grad-op   stage 3 with parameters gathered once, for forward, and kept to backward's end
//   none      stage 0: every rank has everything
//   hybrid    a stage (by default 3) within shard groups of G ranks; the groups are replicas
//
// In stage 1 a rank keeps only its slice of the gradients too, because no whole gradient is left to
// keep (core/sharding/shard.h).
//
// hpZ (Wang et al. 2023, ZeRO++, section 4.2) is not a hybrid: it is stage 3 over all ranks with a
// second partition of the 16-bit parameters over P ranks of a node, from which backward gathers.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace ziggurat {

enum class StrategyName : std::uint8_t { kFull, kGradOp, kNone, kHybrid };
/// Names of the strategies, in the order of StrategyName.
inline constexpr std::array<std::string_view, 4> kStrategyNames{"full", "grad-op", "none",
                                                                "hybrid"};
constexpr std::string_view to_string(StrategyName name) noexcept {
  return kStrategyNames[static_cast<std::size_t>(name)];
}

/// A strategy as it was asked for; what is not given follows from the rest.
struct StrategyRequest {
  std::optional<int> zero_stage = std::nullopt;
  std::optional<StrategyName> name = std::nullopt;
  int shard_group = 0;  ///< hybrid's G; 0 if it is not given
  int hpz = 0;          ///< ranks that share a second partition; 0 if there is none
};

/// What a request comes to on `dp` data-parallel ranks.
struct Strategy {
  int zero_stage = 3;
  bool keeps_params_to_backward = false;  ///< grad-op
  int dp = 1;
  int shard_group = 1;  ///< ranks that divide the state: dp, or a hybrid's G
  int hpz = 0;          ///< 0: no second cut

  /// Number of ranks that divide parameters between uses; 1 if each has all of them.
  int param_shards() const noexcept { return zero_stage == 3 ? shard_group : 1; }
  /// Number of ranks that divide gradients and optimizer state.
  int update_shards() const noexcept { return zero_stage >= 1 ? shard_group : 1; }
  /// Number of equal slices to which a unit is padded. Where fewer ranks divide a class of state,
  /// each of them keeps several slices.
  int slices() const noexcept { return zero_stage == 0 ? dp : shard_group; }
  /// Number of groups that hold the same state.
  int replicas() const noexcept { return dp / shard_group; }
  /// Returns true if groups smaller than the whole run divide the state.
  bool is_hybrid() const noexcept { return zero_stage > 0 && replicas() > 1; }
};
/// Describes a strategy: "stage 3", "stage 2 (grad-op)", "stage 3 in groups of 8", "stage 3, hpz
/// 8".
std::string to_string(const Strategy& strategy);

/// Completes a request. Errors: kInvalidArgument, naming the settings, for a request that
/// contradicts itself (strategy none at stage 3, a shard group without hybrid, ..) or does not
/// divide `dp`, with the arithmetic.
Strategy resolve(const StrategyRequest& request, int dp);

}  // namespace ziggurat
