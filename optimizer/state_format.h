// SPDX-License-Identifier: Apache-2.0
// optimizer/state_format.h: how a record holds an optimizer's state: arrays, bytes and what
// rounding costs.
//
// Bytes per parameter with AdamW (optimizers with one moment drop the second one's):
//
//   format        record                                    record  read  written
//   fp32          master 4, exp_avg 4, exp_avg_sq 4             12    12       12
//   bf16-moments  master 4, exp_avg 2, exp_avg_sq 2              8     8        8
//   8bit          master 4, codes 1 + 1, scales 4/256 each    6.03  6.03     6.03
//   split         param 2, residual 2, moments 4 + 4            12    10       12
//   bf16          param 2, moments 2 + 2                         6     4        6
//
// "Read" leaves out the parameter where the record holds it as it is in use: a reader that has it
// elsewhere skips the first segment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/dtype.h"
#include "base/typed_span.h"
#include "optimizer/optimizer_step.h"
#include "optimizer/state_kind.h"
#include "tiers/record_format.h"

namespace ziggurat {

struct DecayRun;

/// "fp32", "bf16-moments", "8bit", "split", "bf16".
std::string_view to_string(StateFormat format) noexcept;
/// In the order of StateFormat.
std::span<const std::string_view> state_format_names() noexcept;
std::optional<StateFormat> parse_state_format(std::string_view name) noexcept;

/// The segments of a record: parameter or master first, then moments, then scales.
RecordFormat record_format(OptimizerKind kind, StateFormat format);

/// "adamw in 8bit".
std::string to_string(const StateKind& state);
inline RecordFormat record_format(const StateKind& state) {
  return record_format(state.optimizer, state.format);
}

/// Bytes a parameter that updating a record moves from where it is kept, and back: the table above,
/// for any optimizer. `param_elsewhere`: the parameter is in use elsewhere, and not read with it.
struct StateTraffic {
  double read;
  double written;
};
StateTraffic state_traffic(const StateKind& state, bool param_elsewhere);

/// The relative error of a moment that `format` rounds to nearest, at most (rounded stochastically,
/// twice that): 0 where nothing is rounded. For k8Bit see optimizer/eight_bit.h: it is relative to
/// the largest of a block.
double moment_error(StateFormat format) noexcept;

/// Errors: kInvalidArgument for what does not go together: stochastic rounding with kSplit (the two
/// halves would no longer be the master), and a parameter that is not bf16 where the record holds
/// it.
void require_compatible(StateFormat format, Rounding rounding, bool param_is_bf16);

/// What write_record()'s `initial_accumulator` may be. Errors: kInvalidArgument for one that is not
/// in [0, 1e30], or not 0 for an optimizer other than Adagrad.
void require_initial_accumulator(OptimizerKind kind, float value);

/// The rounding of parameters of fp32 masters in a step (OptimizerStep::rounding_key).
struct ParamRounding {
  Rounding rounding = Rounding::kNearest;
  std::uint64_t seed = 0;
  std::uint64_t step = 0;  ///< 0: initial values, which are rounded to nearest
};
/// The parameters that go with a record, with the bits of the update that made it: those it holds,
/// or its masters rounded as that step did. `first_element` as in RecordView; `runs` as of its
/// update, and as far as its places go.
void read_params(StateFormat format, std::span<const std::byte> record,
                 const ParamRounding& rounding, std::uint64_t first_element,
                 std::span<const DecayRun> runs, TypedSpan<std::byte> params);

/// The masters of a record of `format`, exactly, and the other way: with moments of zero, which is
/// how training begins, but for Adagrad's sum, which begins as `initial_accumulator`, rounded to
/// nearest where sums are bf16; 8 bits hold any but a denormal exactly, which becomes zero.
/// `masters` has all the record's elements, padding included.
void read_masters(StateFormat format, std::span<const std::byte> record, std::span<float> masters);
void write_record(OptimizerKind kind, StateFormat format, std::span<const float> masters,
                  std::span<std::byte> record, float initial_accumulator = 0);

}  // namespace ziggurat
