// SPDX-License-Identifier: Apache-2.0
// optimizer/state_values.h: the arrays of a record by name, as fp32 values, in any format.
//
// If values are read and written back, fp32, bf16-moments, split and bf16 keep their bits. Codes of
// 8 bits may change once, by one: a block's new scale is its largest decoded magnitude, and if that
// value is negative, it was decoded as 0.993 of the old scale.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "optimizer/state_format.h"

namespace ziggurat {

/// Returns "master", then the moments in the order of the record, with torch.optim's names.
std::vector<std::string> state_names(OptimizerKind kind);
/// Returns the index of `name` in state_names().
std::optional<std::size_t> find_state(OptimizerKind kind, std::string_view name);

/// Reads the first `values.size()` elements of array `index` of state_names(), exactly; or those
/// from `first` on, which in 8 bits must begin a block. In 8 bits with StateKind::own_blocks they
/// are of one parameter.
void read_state_values(const StateKind& state, std::size_t index, std::span<const std::byte> record,
                       std::span<float> values);
void read_state_values(const StateKind& state, std::size_t index, std::span<const std::byte> record,
                       std::uint64_t first, std::span<float> values);
/// Writes an array from values, rounded to nearest in the format. Codes of 8 bits are made as
/// encode_eight_bit() does, for all blocks. Every NaN becomes 0x7fc00000. Elements of the record
/// beyond `values` are padding, with a master and moments of zero. Only Adagrad's sum is padded
/// with the last value, so that padding does not change the scale of a block. Not with
/// StateKind::own_blocks.
void write_state_values(const StateKind& state, std::size_t index, std::span<const float> values,
                        std::span<std::byte> record);
/// Writes the elements of an array from `first` on, in the same way. Nothing else changes; only in
/// 8 bits, where `first` must begin a block, the rest of the last block becomes padding. With
/// StateKind::own_blocks the elements are the rest of one parameter, and the last block is short.
void write_state_values(const StateKind& state, std::size_t index, std::uint64_t first,
                        std::span<const float> values, std::span<std::byte> record);

}  // namespace ziggurat
