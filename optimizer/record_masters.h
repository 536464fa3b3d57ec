// SPDX-License-Identifier: Apache-2.0
// optimizer/record_masters.h: the masters of a part of a record, in any format. Private to the
// optimizer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "optimizer/slice_element.h"

namespace ziggurat::internal {

/// Returns where the masters of a record of `count` elements are: a slice with nothing else.
inline Slice master_slice(StateFormat format, std::span<std::byte> record, std::size_t count) {
  Slice slice{};
  slice.format = format;
  slice.count = count;
  if (holds_param(format)) {
    slice.param_record = reinterpret_cast<bf16*>(record.data());
    slice.param_in = slice.param_record;
    if (has_residual(format))
      slice.residual = reinterpret_cast<std::uint16_t*>(record.data() + count * sizeof(bf16));
  } else {
    slice.master = reinterpret_cast<float*>(record.data());
  }
  return slice;
}

/// Reads the masters of elements from `first` on, exactly.
inline void read_masters_from(const Slice& slice, std::uint64_t first, std::span<float> masters) {
  with_masters(masters_of(slice.format), [&](auto element) {
    for (std::size_t i = 0; i < masters.size(); ++i) masters[i] = element.load(slice, first + i);
  });
}

/// Writes them, rounded to nearest. Where the record holds the parameter, none may be a NaN but
/// quiet()'s.
inline void write_masters_from(const Slice& slice, std::uint64_t first,
                               std::span<const float> masters) {
  with_masters(masters_of(slice.format), [&](auto element) {
    for (std::size_t i = 0; i < masters.size(); ++i)
      element.store(slice, first + i, masters[i], kNearestNoise);
  });
}

/// A record that is only read, for a slice.
inline std::span<std::byte> only_read(std::span<const std::byte> record) {
  return {const_cast<std::byte*>(record.data()), record.size()};
}

}  // namespace ziggurat::internal
