// SPDX-License-Identifier: Apache-2.0
// optimizer/state_values.h: the arrays of a record by name, as fp32 values, in any format.
//
// Read and written back, fp32, bf16-moments, split and bf16 keep their bits. Codes of 8 bits may
// change once by one: a block's scale is its largest decoded magnitude, and where that one is
// negative it was decoded as 0.993 of the scale it was made with.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "optimizer/state_format.h"

namespace ziggurat {

/// "master", then the moments in the order of the record, as torch.optim calls them.
std::vector<std::string> state_names(OptimizerKind kind);
/// The place of `name` among them.
std::optional<std::size_t> find_state(OptimizerKind kind, std::string_view name);

/// The first `values.size()` elements of array `index` of state_names(), exactly.
void read_state_values(const StateKind& state, std::size_t index, std::span<const std::byte> record,
                       std::span<float> values);
/// The other way, rounded as the format has it: to nearest; 8 bits as encode_eight_bit() does, all
/// blocks anew. Every NaN becomes 0x7fc00000. What the record has beyond `values` is padding:
/// a master and a moment of zero, but for Adagrad's sum, whose padding is the last value, so that
/// it does not change the scale of a block.
void write_state_values(const StateKind& state, std::size_t index, std::span<const float> values,
                        std::span<std::byte> record);

}  // namespace ziggurat
