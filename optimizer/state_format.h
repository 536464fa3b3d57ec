// SPDX-License-Identifier: Apache-2.0
// optimizer/state_format.h: how a record holds an optimizer's state: its arrays, its bytes and the
// error of rounding.
//
// Bytes per parameter with AdamW (optimizers with one moment need no bytes for the second):
//
//   format        record                                    record  read  written
//   fp32          master 4, exp_avg 4, exp_avg_sq 4             12    12       12
//   bf16-moments  master 4, exp_avg 2, exp_avg_sq 2              8     8        8
//   8bit          master 4, codes 1 + 1, scales 4/256 each    6.03  6.03     6.03
//   split         param 2, residual 2, moments 4 + 4            12    10       12
//   bf16          param 2, moments 2 + 2                         6     4        6
//
// Records in 8bit that several parameters share (StateKind::own_blocks) have places for a scale per
// 16 elements, so they take 6.5.
//
// "Read" leaves out the parameter if the record holds it bit for bit: a reader that has the
// parameter elsewhere skips the first segment.
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
#include "tiers/store/record_format.h"

namespace ziggurat {

struct DecayRun;

/// Returns a name: "fp32", "bf16-moments", "8bit", "split", "bf16".
std::string_view to_string(StateFormat format) noexcept;
/// Returns the names in the order of StateFormat.
std::span<const std::string_view> state_format_names() noexcept;
std::optional<StateFormat> parse_state_format(std::string_view name) noexcept;

/// Returns the segments of a record: parameter or master first, then moments, then scales.
RecordFormat record_format(const StateKind& state);
inline RecordFormat record_format(OptimizerKind kind, StateFormat format) {
  return record_format(StateKind{kind, format});
}

/// Formats a kind of state: "adamw in 8bit".
std::string to_string(const StateKind& state);

/// The bytes per parameter that an update of a record reads and writes: the table above, for any
/// optimizer. `param_elsewhere` says that the parameter is in use elsewhere, and not read with the
/// record.
struct StateTraffic {
  double read;
  double written;
};
StateTraffic state_traffic(const StateKind& state, bool param_elsewhere);

/// Checks that the settings fit together. Errors: kInvalidArgument for stochastic rounding with
/// kSplit (the two halves would no longer be the master), and for a parameter that is not bf16
/// although the record holds it.
void require_compatible(StateFormat format, Rounding rounding, bool param_is_bf16);

/// Checks the `initial_accumulator` of write_record(). Errors: kInvalidArgument if it is not in [0,
/// 1e30], or not 0 for an optimizer other than Adagrad.
void require_initial_accumulator(OptimizerKind kind, float value);

/// The rounding of parameters that are made from fp32 masters in a step
/// (OptimizerStep::rounding_key).
struct ParamRounding {
  Rounding rounding = Rounding::kNearest;
  std::uint64_t seed = 0;
  std::uint64_t step = 0;  ///< 0 for initial values, which are rounded to nearest
};
/// Makes the parameters of a record, with the bits of the update that made it: copies those that it
/// holds, or rounds its masters as that step did. `first_element` is as in RecordView; `runs` are
/// those of its update, as far as their places matter.
void read_params(StateFormat format, std::span<const std::byte> record,
                 const ParamRounding& rounding, std::uint64_t first_element,
                 std::span<const DecayRun> runs, TypedSpan<std::byte> params);

/// Reads the masters of a record of `format`, exactly. write_record() makes a record from masters,
/// with moments of zero, as training begins. Only Adagrad's sum begins as `initial_accumulator`,
/// rounded to nearest if sums are bf16; 8 bits hold it exactly, except a denormal, which becomes
/// zero. `masters` has all the record's elements, padding included.
void read_masters(StateFormat format, std::span<const std::byte> record, std::span<float> masters);
void write_record(const StateKind& state, std::span<const float> masters,
                  std::span<std::byte> record, float initial_accumulator = 0);
inline void write_record(OptimizerKind kind, StateFormat format, std::span<const float> masters,
                         std::span<std::byte> record, float initial_accumulator = 0) {
  write_record(StateKind{kind, format}, masters, record, initial_accumulator);
}

}  // namespace ziggurat
