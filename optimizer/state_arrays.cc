// SPDX-License-Identifier: Apache-2.0
// optimizer/state_arrays.cc: finds each array in a record, and joins or divides a split master.
#include "optimizer/state_arrays.h"

#include <cstring>

#include "base/check.h"
#include "optimizer/eight_bit.h"
#include "optimizer/record_masters.h"
#include "optimizer/record_slice.h"
#include "optimizer/rounding.h"
#include "optimizer/state_format.h"
#include "optimizer/state_values.h"

namespace ziggurat {
namespace {

bool is_split_master(const StateKind& state, std::size_t index) {
  return index == 0 && has_residual(state.format);
}

/// Returns the bytes of an array. The segments are in the order of the arrays, but a split master
/// has two segments.
template <class Byte>
std::span<Byte> array_in(const StateKind& state, std::size_t index, std::span<Byte> record) {
  if (is_split_master(state, index)) return {};
  const RecordFormat shape = record_format(state);
  const std::size_t segment = index + (has_residual(state.format) && index > 0 ? 1 : 0);
  const std::uint64_t tiles = shape.tiles(record.size());
  return record.subspan(shape.offset(segment, tiles), tiles * shape.segments()[segment].tile_bytes);
}

/// Calls `copy` with parts of an array, from element `first` on, that lie one after the other, and
/// with where each begins among `size_bytes` of values.
template <class Byte, class Copy>
void for_each_part(const StateKind& state, std::size_t index, std::span<Byte> record,
                   std::uint64_t first, std::size_t size_bytes, Copy copy) {
  const std::span<Byte> array = array_in(state, index, record);
  const StateArray its = state_arrays(state)[index];
  const std::size_t value_bytes = its.element_bytes();
  const bool apart = its.is_scale() && state.own_blocks;
  const std::size_t part_bytes = apart ? value_bytes : size_bytes;
  std::uint64_t place = first / (its.is_scale() ? scale_step(state.own_blocks) : 1);
  for (std::size_t at = 0; at < size_bytes; at += part_bytes) {
    ZIGGURAT_CHECK(place * value_bytes + part_bytes <= array.size(),
                   "array {} of a record of {} bytes", index, record.size());
    copy(at, array.subspan(place * value_bytes, part_bytes));
    place += kEightBitBlock / kSharedRecordStep;
  }
}

}  // namespace

std::vector<StateArray> state_arrays(const StateKind& state) {
  const std::vector<std::string> names = state_names(state.optimizer);
  const StateElement moments = info_of(moments_of(state.format)).element;
  std::vector<StateArray> arrays{
      {names[0], rounds_masters(state.format) ? StateElement::kBF16 : StateElement::kF32}};
  for (std::size_t i = 1; i < names.size(); ++i) arrays.push_back({names[i], moments});
  if (!has_codes(state.format)) return arrays;
  for (std::size_t i = 1; i < names.size(); ++i)
    arrays.push_back({names[i] + ".scale", StateElement::kF32, kEightBitBlock});
  return arrays;
}

std::span<const std::byte> state_array_in(const StateKind& state, std::size_t index,
                                          std::span<const std::byte> record) {
  return array_in(state, index, record);
}

std::span<std::byte> state_array_in(const StateKind& state, std::size_t index,
                                    std::span<std::byte> record) {
  return array_in(state, index, record);
}

void read_state_array(const StateKind& state, std::size_t index, std::span<const std::byte> record,
                      std::uint64_t first, std::span<std::byte> bytes) {
  if (!is_split_master(state, index)) {
    for_each_part(state, index, record, first, bytes.size(), [&](std::size_t at, auto from) {
      std::memcpy(bytes.data() + at, from.data(), from.size());
    });
    return;
  }
  const internal::Slice slice = internal::arrays_of(state, internal::only_read(record));
  internal::with_masters(masters_of(state.format), [&](auto element) {
    for (std::size_t i = 0; i < bytes.size() / sizeof(float); ++i)
      store_element(bytes.data(), i, element.load(slice, first + i));
  });
}

void write_state_array(const StateKind& state, std::size_t index, std::span<const std::byte> bytes,
                       std::uint64_t first, std::span<std::byte> record) {
  if (!is_split_master(state, index)) {
    for_each_part(state, index, record, first, bytes.size(), [&](std::size_t at, auto to) {
      std::memcpy(to.data(), bytes.data() + at, to.size());
    });
    return;
  }
  const internal::Slice slice = internal::arrays_of(state, record);
  internal::with_masters(masters_of(state.format), [&](auto element) {
    for (std::size_t i = 0; i < bytes.size() / sizeof(float); ++i)
      element.store(slice, first + i, quiet(load_element<float>(bytes.data(), i)), kNearestNoise);
  });
}

}  // namespace ziggurat
