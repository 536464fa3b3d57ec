// SPDX-License-Identifier: Apache-2.0
// optimizer/state_arrays.h: the arrays of a record as the format holds them, bit for bit. A copy of
// the state consists of these.
//
//   format        arrays (AdamW)
//   fp32, split   master f32, exp_avg f32, exp_avg_sq f32
//   bf16-moments  master f32, exp_avg bf16, exp_avg_sq bf16
//   8bit          master f32, exp_avg u8, exp_avg_sq u8, exp_avg.scale f32, exp_avg_sq.scale f32
//   bf16          master bf16, exp_avg bf16, exp_avg_sq bf16
//
// The two halves of split are one fp32 master, exactly. Scales have a value for each kEightBitBlock
// elements, counted from the beginning of a unit, or with StateKind::own_blocks of a parameter. For
// the values as fp32 see state_values.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "optimizer/state_kind.h"

namespace ziggurat {

struct StateArray {
  std::string name;
  StateElement element;
  std::uint32_t block = 1;  ///< elements of a parameter per value

  std::uint32_t element_bytes() const noexcept { return ziggurat::element_bytes(element); }
  bool is_scale() const noexcept { return block > 1; }
  /// Returns how many values belong to `count` elements from the beginning of a block on.
  std::uint64_t values_of(std::uint64_t count) const noexcept {
    return (count + block - 1) / block;
  }
};

/// Returns the arrays: the master first, then moments, then their scales.
std::vector<StateArray> state_arrays(const StateKind& state);
/// The number of arrays of a constant parameter.
inline constexpr std::size_t kConstantArrays = 1;

/// Returns the bytes of an array whose values lie one after the other, padding included. Empty for
/// a split master, which has two halves. Scales of StateKind::own_blocks lie at their blocks' first
/// elements, each counted in kSharedRecordStep.
std::span<const std::byte> state_array_in(const StateKind& state, std::size_t index,
                                          std::span<const std::byte> record);
std::span<std::byte> state_array_in(const StateKind& state, std::size_t index,
                                    std::span<std::byte> record);
/// Copies bytes.size() / element_bytes values of array `index` to `bytes`, from that of element
/// `first` on, where scales have a block that begins.
void read_state_array(const StateKind& state, std::size_t index, std::span<const std::byte> record,
                      std::uint64_t first, std::span<std::byte> bytes);
/// Copies `bytes` into array `index`, from the value of element `first` on; the rest of the record
/// does not change.
void write_state_array(const StateKind& state, std::size_t index, std::span<const std::byte> bytes,
                       std::uint64_t first, std::span<std::byte> record);

}  // namespace ziggurat
