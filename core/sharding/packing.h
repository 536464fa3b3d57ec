// SPDX-License-Identifier: Apache-2.0
// core/sharding/packing.h: puts many small parameters that a trainer lends into one unit, so that
// they share records, jobs and waits.
//
// A unit is padded to whole tiles, and each of its chunks has a record, a coroutine and a job. For
// a parameter of a few elements that costs a thousand times its bytes. Parameters that share a unit
// keep all else of their own: settings, count of steps, and whether a step has a gradient for them
// are per run of elements (DecayRun).
//
// In 8 bits each has blocks of codes of its own, and so the bits that it has alone: its first
// element is at a multiple of kSharedRecordStep where none of its blocks crosses a multiple of
// kEightBitBlock. Chunks end at such multiples too, so they never cut a block.
//
//   parameters of 10, 300 and 16 elements:  [0, 10), [256, 556), [560, 576)
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/sharding/model_spec.h"
#include "optimizer/state_kind.h"

namespace ziggurat {

/// A parameter with fewer elements is packed.
inline constexpr std::uint64_t kPackedBelow = std::uint64_t{1} << 14;
/// Most elements of a unit of several parameters, gaps included: a trainer waits for the whole
/// unit.
inline constexpr std::uint64_t kPackElementsMax = std::uint64_t{1} << 16;

/// Returns `lent`, which has a unit for each parameter, with each one's number and whether it is
/// constant.
ModelSpec numbered_model(ModelSpec lent);
/// Returns `lent`, which has a unit for each parameter, with small parameters of one type together
/// in units; of streamed ones only those that the trainer acquires together.
ModelSpec packed_model(const ModelSpec& lent, StateFormat format);
/// Adds units of a parameter each to `model`, packed in the same way. Those that are not stored
/// need no format: nothing of them is in 8 bits.
void add_packed(ModelSpec& model, std::span<const UnitSpec> lent,
                std::optional<StateFormat> format);
/// Returns the model of a layout with a unit for each parameter, in the trainer's order. Errors:
/// kDataLoss for numbers of parameters that no trainer gives.
ModelSpec unpacked_model(const ModelSpec& packed);
/// Returns `lent` with its parameters in the units of `layout`, or as it is if they are not the
/// parameters of `layout`, in the same order. Errors: kDataLoss for a layout that no store can
/// have.
ModelSpec packed_as(const ModelSpec& lent, const std::string& layout);
/// Returns where each of a unit's parameters begins and, as the last value, where the unit ends.
std::vector<std::uint64_t> param_begins(const UnitSpec& unit);

}  // namespace ziggurat
