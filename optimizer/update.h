// SPDX-License-Identifier: Apache-2.0
// optimizer/update.h: one optimizer step over a record in one pass: verify, widen the gradient,
// update, round the parameter, hash.
//
// The scalar kernel (rules.h, slice_element.h) is the specification; every SIMD target gives its
// bits. Only + - x / and sqrt, in the order written there, never fused. Plain functions over spans,
// callable from any worker. Non-finite values spread as IEEE has it; every NaN stored is
// 0x7fc00000.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/typed_span.h"
#include "optimizer/optimizer_step.h"
#include "optimizer/rounding.h"
#include "optimizer/state_format.h"

namespace ziggurat {

/// Elements [begin, end) of a record share their settings; runs cover the record in order.
struct DecayRun {
  std::size_t begin;
  std::size_t end;
  bool decay;
  std::uint32_t group = 0;  ///< whose step: of StepScalars
  /// Where stochastic rounding is keyed by parameters: where the run is in its own. Otherwise the
  /// key is of the model's tile (RecordView::first_element).
  std::optional<ParamPlace> place = std::nullopt;
};

/// A step's scalars for each parameter group; kind, rounding and key are the same in all. A single
/// OptimizerStep is group 0's, where it is alone.
using StepScalars = std::vector<OptimizerStep>;
class StepView : public std::span<const OptimizerStep> {
 public:
  StepView(const StepScalars& steps) : span(steps) {}      // NOLINT: converts
  StepView(const OptimizerStep& step) : span(&step, 1) {}  // NOLINT: converts
};

/// A record and what goes with it.
struct RecordView {
  StateFormat format = StateFormat::kFp32;
  std::span<std::byte> record{};  ///< updated in place; record_format(kind, format)
  /// As many elements as the record has, or up to a tile less: what the record has more of is
  /// padding, whose gradient is zero. None: no step is made, and the record stays, but for
  /// masters_from_param, to be hashed as the next generation's.
  TypedSpan<const std::byte> grad{};
  /// Out: fp32 as it is, fp16 rounded to nearest even, bf16 by the step's rounding; as many as
  /// `grad`. May be empty where the record holds the parameter (holds_param), and is bf16 otherwise
  /// there.
  TypedSpan<std::byte> param{};
  /// Only where the record begins with the parameter (begins_with_param): its first segment was not
  /// read; the parameter as it was is in `param`. The segment is written all the same.
  bool param_not_read = false;
  /// The masters are taken anew from `param`, as it was, before the step; the moments stay. Not
  /// with param_not_read.
  bool masters_from_param = false;
  /// The record's first element among the model's (whole tiles): keys stochastic rounding where
  /// runs have no place.
  std::uint64_t first_element = 0;
};

/// Hashes of the record before and after (tiers/record_hash.h), each piece taken while it is in
/// cache.
struct UpdateHashing {
  bool verify = false;  ///< the record as it came, too
  std::uint64_t seed_before = 0;
  std::uint64_t seed_after = 0;
};
struct UpdateHashes {
  std::uint64_t before = 0;  ///< 0 if not verified
  std::uint64_t after = 0;   ///< 0 if not hashed
};

/// Makes its group's step on every element of `view`. `runs` must cover the record, in groups that
/// have a step; `hashing` may be null. Format, rounding and parameter must be compatible
/// (require_compatible).
UpdateHashes update_record(StepView steps, const RecordView& view, std::span<const DecayRun> runs,
                           const UpdateHashing* hashing = nullptr);

}  // namespace ziggurat
