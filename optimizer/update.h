// SPDX-License-Identifier: Apache-2.0
// optimizer/update.h: one optimizer step over a record in one pass: verify, widen the gradient,
// update, round the parameter, hash.
//
// The scalar kernel (optimizers.h, slice_element.h) is the specification, and every SIMD target
// gives its bits. Only + - x / and sqrt are used, in the order written there, never fused. Plain
// functions over spans, callable from any worker. Non-finite values spread as in IEEE 754; every
// NaN stored is 0x7fc00000.
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

/// Elements [begin, end) of a record that share their settings. Runs cover the record in order.
struct DecayRun {
  std::size_t begin;
  std::size_t end;
  bool decay;
  std::uint32_t group = 0;  ///< which of the StepScalars is its step
  /// The run's place in its parameter, if stochastic rounding is keyed by parameters. Otherwise the
  /// key is that of the model's tile (RecordView::first_element).
  std::optional<ParamPlace> place = std::nullopt;
  /// No step is made: the run's elements have no gradient, and their state stays as it is, bit for
  /// bit. In 8 bits no block of codes may have elements of such a run and of one that is stepped,
  /// except padding.
  bool skipped = false;
  /// RecordView::masters_from_param does not apply to the run.
  bool keeps_masters = false;
};

/// The scalars of a step, one entry per parameter group; kind, rounding and key are the same in
/// all. A single OptimizerStep is that of group 0, if it is the only group.
using StepScalars = std::vector<OptimizerStep>;
class StepView : public std::span<const OptimizerStep> {
 public:
  StepView(const StepScalars& steps) : span(steps) {}      // NOLINT: converts
  StepView(const OptimizerStep& step) : span(&step, 1) {}  // NOLINT: converts
};

/// A record, with its gradient and parameter.
struct RecordView {
  StateFormat format = StateFormat::kFp32;
  /// As in StateKind. Each run that is stepped is of one parameter, from a place for a scale on.
  bool own_blocks = false;
  std::span<std::byte> record{};  ///< updated in place; its record_format()
  /// The gradient of as many elements as the record has, or up to a tile less: the rest of the
  /// record is padding, whose gradient is zero. If empty, no step is made, and the record does not
  /// change, except by masters_from_param; it is hashed as the next generation's.
  TypedSpan<const std::byte> grad{};
  /// The parameter that is written, as many elements as `grad`: fp32 unchanged, fp16 rounded to
  /// nearest even, bf16 by the step's rounding. If the record holds the parameter (holds_param),
  /// this is empty or bf16.
  TypedSpan<std::byte> param{};
  /// Says that the record's first segment was not read, and that the old parameter is in `param`.
  /// Only if the record begins with the parameter (begins_with_param). The segment is written all
  /// the same.
  bool param_not_read = false;
  /// Says that the masters are set to the old `param` before the step, except those of runs that
  /// keep theirs; the moments do not change. Not with param_not_read.
  bool masters_from_param = false;
  /// The number of the record's first element in the model (whole tiles). It keys stochastic
  /// rounding if runs have no place.
  std::uint64_t first_element = 0;
};

/// Asks for hashes of the record before and after (tiers/store/record_hash.h). Each piece is hashed
/// while it is in cache.
struct UpdateHashing {
  bool verify = false;  ///< also hash the record as it was before
  std::uint64_t seed_before = 0;
  std::uint64_t seed_after = 0;
};
struct UpdateHashes {
  std::uint64_t before = 0;  ///< 0 if not verified
  std::uint64_t after = 0;   ///< 0 if not hashed
};

/// Makes a step on every element of `view`, each with the step of its group. `runs` must cover the
/// record in groups that have a step; `hashing` may be null. Format, rounding and parameter must be
/// compatible (require_compatible).
UpdateHashes update_record(StepView steps, const RecordView& view, std::span<const DecayRun> runs,
                           const UpdateHashing* hashing = nullptr);

}  // namespace ziggurat
