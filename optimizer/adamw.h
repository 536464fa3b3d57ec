// SPDX-License-Identifier: Apache-2.0
// optimizer/adamw.h: AdamW over a record, in one pass: verify, update, round, hash.
//
// The scalar kernel (adamw_scalar.cc) is the specification; every SIMD target gives its bits. Only
// + - x / and sqrt, in the order written there, never fused. Plain functions over spans, noexcept,
// callable from any worker. Source: Loshchilov & Hutter 2019, Algorithm 2 (decoupled decay),
// bias-corrected as in Kingma & Ba 2015.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/dtype.h"

namespace ziggurat {

/// The scalars of one step, computed once (in double, powers of beta by repeated squaring in a
/// fixed order) for all chunks.
struct AdamWStep {
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float eps;
  float step_size;       ///< lr / (1 - beta1^t)
  float inv_bias2_sqrt;  ///< 1 / sqrt(1 - beta2^t)
  float decay_factor;    ///< 1 - lr * weight_decay
  /// Clip factor times 1/(accumulation divisor): multiplies the widened gradient
  float grad_scale;

  struct Settings {
    float learning_rate;
    float beta1;
    float beta2;
    float eps;
    float weight_decay;
    float grad_scale;
    std::uint64_t t;  ///< number of this step, from 1
  };
  static AdamWStep make(const Settings& settings) noexcept;
  bool operator==(const AdamWStep&) const = default;
};

/// Elements [begin, end) of a record share a decay setting; runs cover the record in order.
struct DecayRun {
  std::size_t begin;
  std::size_t end;
  bool decay;
};

/// Views of one record and what goes with it; all of the same count.
struct AdamWRecord {
  std::span<float> master, exp_avg, exp_avg_sq;  ///< in place
  std::span<const bf16> grad;
  std::span<bf16> param;  ///< out
};

/// Updates `record`, any count and alignment. Bits do not depend on the target in use; every NaN
/// stored is 0x7fc00000. `runs` must cover the record.
void adamw_update(const AdamWStep& step, const AdamWRecord& record,
                  std::span<const DecayRun> runs) noexcept;

/// adamw_update tile by tile (tiers/record_hash.h), hashing each tile before and after while it is
/// in cache. Counts must be a multiple of kTileElements; the arrays are the consecutive thirds of
/// the record.
struct HashedUpdate {
  bool verify;  ///< compute the hash of the record as it came
  std::uint64_t seed_before, seed_after;
};
struct RecordHashes {
  std::uint64_t before = 0;  ///< 0 if not verified
  std::uint64_t after = 0;
};
RecordHashes adamw_update_hashed(const AdamWStep& step, const AdamWRecord& record,
                                 std::span<const DecayRun> runs, const HashedUpdate& hashing);

/// The instruction set in use ("scalar", "AVX2", "AVX3", ...), and all that this CPU can run.
/// ZIGGURAT_SIMD=name forces one (read once, at first use; an unknown or unsupported name is an
/// Error listing the valid ones: call simd_target() at start, for kernels cannot throw; they log it
/// and run at the best target, whose bits are the same).
std::string_view simd_target();
std::vector<std::string_view> simd_targets();
/// For tests: force a target by name from now on; empty name returns to the best. Errors:
/// kInvalidArgument.
void force_simd_target(std::string_view name);

}  // namespace ziggurat
