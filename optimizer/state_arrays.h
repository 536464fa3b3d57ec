// SPDX-License-Identifier: Apache-2.0
// optimizer/state_arrays.h: the arrays of a record as the format holds them, bit for bit: what a
// copy of the state is made of.
//
//   format        arrays (AdamW)
//   fp32, split   master f32, exp_avg f32, exp_avg_sq f32
//   bf16-moments  master f32, exp_avg bf16, exp_avg_sq bf16
//   8bit          master f32, exp_avg u8, exp_avg_sq u8, exp_avg.scale f32, exp_avg_sq.scale f32
//   bf16          master bf16, exp_avg bf16, exp_avg_sq bf16
//
// split's two halves are one fp32 master, exactly. Scales have a value for each kEightBitBlock
// elements, counted from the beginning of a unit. For the values as fp32 see state_values.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "optimizer/state_kind.h"

namespace ziggurat {

enum class StateElement : std::uint8_t { kF32, kBF16, kCode };

struct StateArray {
  std::string name;
  StateElement element;
  std::uint32_t block = 1;  ///< elements of a parameter for each value

  std::uint32_t element_bytes() const noexcept {
    return element == StateElement::kF32 ? 4 : element == StateElement::kBF16 ? 2 : 1;
  }
  bool is_scale() const noexcept { return block > 1; }
};

/// The master first, then moments, then their scales.
std::vector<StateArray> state_arrays(const StateKind& state);
/// What a constant parameter has of them.
inline constexpr std::size_t kConstantArrays = 1;

/// Where the record has the array's values one after the other; empty for a split master, which has
/// two halves. Padding included.
std::span<const std::byte> state_array_in(const StateKind& state, std::size_t index,
                                          std::span<const std::byte> record);
std::span<std::byte> state_array_in(const StateKind& state, std::size_t index,
                                    std::span<std::byte> record);
/// Values [first, first + bytes.size() / element_bytes) of array `index`, to `bytes`.
void read_state_array(const StateKind& state, std::size_t index, std::span<const std::byte> record,
                      std::uint64_t first, std::span<std::byte> bytes);
/// The other way; the rest of the record stays as it is.
void write_state_array(const StateKind& state, std::size_t index, std::span<const std::byte> bytes,
                       std::uint64_t first, std::span<std::byte> record);

}  // namespace ziggurat
