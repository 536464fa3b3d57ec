// SPDX-License-Identifier: Apache-2.0
// optimizer/state_values.cc: converts the segments of a record to fp32 values and back.
#include "optimizer/state_values.h"

#include <algorithm>

#include "base/bytes.h"
#include "base/check.h"
#include "base/dtype.h"
#include "base/numerics/rounding.h"
#include "optimizer/eight_bit.h"
#include "optimizer/kernels.h"
#include "optimizer/record_masters.h"
#include "optimizer/record_slice.h"
#include "optimizer/rounding.h"

namespace ziggurat {
namespace {

std::size_t elements_in(const StateKind& state, std::span<const std::byte> record) {
  return record_format(state).tiles(record.size()) * kTileElements;
}

/// Calls `body` for elements of a record from `first` on, which begins a block, so that in each
/// call the scales of all blocks lie one after the other: with the elements, counted from `first`,
/// and the place of their first scale.
template <class Body>
void for_each_scaled(const StateKind& state, std::uint64_t first, std::size_t count, Body body) {
  const std::size_t step = scale_step(state.own_blocks);
  ZIGGURAT_CHECK(first % step == 0, "codes from {} on begin no block", first);
  const std::size_t together = state.own_blocks ? kEightBitBlock : count;
  for (std::size_t begin = 0; begin < count; begin += together)
    body(begin, std::min(together, count - begin), (first + begin) / step);
}

/// Writes array `index` from values that are no signalling NaN. In 8 bits `first` begins a block,
/// and only the record's last block is short, or that of its parameter.
void write_values(const StateKind& state, std::size_t index, std::uint64_t first,
                  std::span<const float> values, std::span<std::byte> record) {
  const internal::Slice slice = internal::arrays_of(state, record);
  if (index == 0) return internal::write_masters_from(slice, first, values);
  const std::size_t k = index - 1;
  std::byte* const moments = slice.moments[k];
  if (has_codes(state.format)) {
    auto* const codes = reinterpret_cast<std::uint8_t*>(moments) + first;
    const EightBitCode code = internal::moment_code(state.optimizer, k);
    const auto encode = [&](std::size_t begin, std::size_t count, std::size_t scale) {
      encode_eight_bit(code, values.data() + begin, {codes + begin, count},
                       slice.scales[k] + scale);
    };
    return for_each_scaled(state, first, values.size(), encode);
  }
  internal::with_moments(moments_of(state.format), [&](auto element) {
    for (std::size_t i = 0; i < values.size(); ++i)
      element.store(moments, first + i, values[i], kNearestNoise);
  });
}

/// Returns `values` without signalling NaNs, padded to `count`.
std::vector<float> padded(const StateKind& state, std::size_t index, std::span<const float> values,
                          std::size_t count) {
  const bool is_sum = index == 1 && info_of(state.optimizer).has_initial_accumulator;
  std::vector<float> all(count, is_sum ? quiet(values.back()) : 0.0F);
  std::ranges::transform(values, all.begin(), quiet);
  return all;
}

}  // namespace

std::optional<std::size_t> find_state(OptimizerKind kind, std::string_view name) {
  const std::vector<std::string> names = state_names(kind);
  const auto found = std::ranges::find(names, name);
  if (found == names.end()) return std::nullopt;
  return static_cast<std::size_t>(found - names.begin());
}

void read_state_values(const StateKind& state, std::size_t index, std::span<const std::byte> record,
                       std::span<float> values) {
  read_state_values(state, index, record, 0, values);
}

void read_state_values(const StateKind& state, std::size_t index, std::span<const std::byte> record,
                       std::uint64_t first, std::span<float> values) {
  const internal::Slice slice = internal::arrays_of(state, internal::only_read(record));
  ZIGGURAT_CHECK(first + values.size() <= slice.count, "{} values from {} on of a record of {}",
                 values.size(), first, slice.count);
  if (index == 0) return internal::read_masters_from(slice, first, values);
  const std::size_t k = index - 1;
  const std::byte* const moments = slice.moments[k];
  if (has_codes(state.format)) {
    const auto* const codes = reinterpret_cast<const std::uint8_t*>(moments) + first;
    const EightBitCode code = internal::moment_code(state.optimizer, k);
    const auto decode = [&](std::size_t begin, std::size_t count, std::size_t scale) {
      decode_eight_bit(code, {codes + begin, count}, slice.scales[k] + scale,
                       values.data() + begin);
    };
    return for_each_scaled(state, first, values.size(), decode);
  }
  internal::with_moments(moments_of(state.format), [&](auto element) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = element.load(moments, first + i);
  });
}

void write_state_values(const StateKind& state, std::size_t index, std::span<const float> values,
                        std::span<std::byte> record) {
  const std::size_t all = elements_in(state, record);
  ZIGGURAT_CHECK(!state.own_blocks, "{} values that may be of several parameters", values.size());
  ZIGGURAT_CHECK(!values.empty() && values.size() <= all, "{} values for a record of {}",
                 values.size(), all);
  write_values(state, index, 0, padded(state, index, values, all), record);
}

void write_state_values(const StateKind& state, std::size_t index, std::uint64_t first,
                        std::span<const float> values, std::span<std::byte> record) {
  const std::size_t all = elements_in(state, record);
  const bool padded_block = has_codes(state.format) && !state.own_blocks;
  const std::size_t count = padded_block ? round_up(values.size(), kEightBitBlock) : values.size();
  ZIGGURAT_CHECK(!values.empty() && first + count <= all, "{} values from {} on for a record of {}",
                 values.size(), first, all);
  write_values(state, index, first, padded(state, index, values, count), record);
}

}  // namespace ziggurat
