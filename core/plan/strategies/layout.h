// SPDX-License-Identifier: Apache-2.0
// core/plan/strategies/layout.h: how a training is divided among ranks and tiers, in the words of
// all systems: DDP, ZeRO, FSDP, hybrids, offload, tensor, pipeline and expert parallelism.
//
// Plain data. core/sharding/strategy.h says what our own engine does; this says what any of them
// does, so that they can be compared.
#pragma once

#include <cstdint>
#include <string>

#include "core/sharding/placement.h"

namespace ziggurat {

/// Bytes of a parameter's state, by part. 2 + 2 + 12 is mixed precision with an fp32 master; 2 + 2
/// + 8 has no master; 4 + 4 + 0 + 8 trains fp32 parameters that are computed with in 16 bits.
struct StateRecipe {
  double param = 2;
  double gradient = 2;
  double master = 4;
  double moments = 8;
  double optimizer() const noexcept { return master + moments; }
  double total() const noexcept { return param + gradient + optimizer(); }
};

struct ParallelLayout {
  int dp = 1;                      ///< ranks with data of their own
  int tp = 1;                      ///< ranks that divide every layer
  int pp = 1;                      ///< ranks that divide the layers
  int ep = 1;                      ///< ranks among the dp that divide the experts
  bool sequence_parallel = false;  ///< tensor ranks divide the rows of norms and dropouts too
  int pipeline_chunks = 1;         ///< chunks of layers on a pipeline rank (interleaved 1F1B)

  int stage = 0;        ///< ZeRO's: 0 nothing, 1 optimizer, 2 gradients, 3 parameters are divided
  int shard_group = 0;  ///< ranks that hold one copy together (HSDP, MiCS); 0 for all of dp
  int hpz = 0;          ///< ranks that hold a second copy of the parameters together (ZeRO++)
  bool keeps_gathered = false;  ///< parameters stay whole from forward to backward (SHARD_GRAD_OP)
  bool quantized = false;       ///< gathers in 8 bits and reduces in 4 (ZeRO++)

  Tier params = Tier::kDevice;     ///< where a rank's part rests
  Tier optimizer = Tier::kDevice;  ///< masters and moments; the update runs there, or on the host

  int ranks() const noexcept { return dp * tp * pp; }
  /// Returns how many of `layers` the fullest pipeline rank has.
  std::int64_t layers_of_a_rank(std::int64_t layers) const noexcept {
    return (layers + pp - 1) / pp;
  }
  /// Returns among how many ranks a divided part of a dense parameter lies.
  int shards() const noexcept { return shard_group > 0 ? shard_group : dp; }
};

/// The bytes of state that one rank holds between the last backward and the update.
struct StateBytes {
  double params = 0;
  double second_params = 0;  ///< hpZ's
  double gradients = 0;
  double master = 0;
  double moments = 0;
  double total() const noexcept { return params + second_params + gradients + master + moments; }
};

/// Divides the state of `count` parameters, of which tensor, pipeline and expert ranks have taken
/// their part already (Rajbhandari et al. 2020, "ZeRO", section 3; Zhang et al. 2022, "MiCS"; Wang
/// et al. 2023, "ZeRO++", section 4.2).
StateBytes state_bytes(double count, const StateRecipe& recipe, const ParallelLayout& layout);

/// Returns the least number of devices of `device_bytes` that hold the state of `count` parameters
/// fully divided, with `beside_bytes` of other things on each. 0 if no number does.
std::int64_t fewest_devices(double count, const StateRecipe& recipe, double device_bytes,
                            double beside_bytes);

}  // namespace ziggurat
