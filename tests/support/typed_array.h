// SPDX-License-Identifier: Apache-2.0
// tests/support/typed_array.h: an array that owns its memory and whose type is known at run time
// only, as trainers have them.
#pragma once

#include <cstddef>
#include <ostream>
#include <span>
#include <vector>

#include "base/numerics/typed_value.h"
#include "base/typed_span.h"

namespace ziggurat::testing {

/// Two are equal if their bits are.
struct TypedArray {
  DType dtype = DType::kFloat32;
  std::vector<std::byte> bytes{};

  TypedArray() = default;
  TypedArray(DType its_dtype, std::size_t count)
      : dtype(its_dtype), bytes(count * size_bytes(its_dtype)) {}
  /// `values`, rounded to nearest.
  TypedArray(DType its_dtype, std::span<const float> values)
      : TypedArray(its_dtype, values.size()) {
    for (std::size_t i = 0; i < values.size(); ++i) set(i, values[i]);
  }

  std::size_t count() const { return bytes.size() / size_bytes(dtype); }
  TypedSpan<std::byte> span() { return {dtype, bytes}; }
  TypedSpan<const std::byte> span() const { return {dtype, bytes}; }
  float at(std::size_t i) const { return value_at(dtype, bytes.data(), i); }
  void set(std::size_t i, float value) { store_value(dtype, bytes.data(), i, value); }
  /// The same, and zeros up to `count_` elements.
  TypedArray padded(std::size_t count_) const {
    TypedArray longer = *this;
    longer.bytes.resize(count_ * size_bytes(dtype));
    return longer;
  }
  friend bool operator==(const TypedArray&, const TypedArray&) = default;
};

/// Not every byte of them.
inline void PrintTo(const TypedArray& array, std::ostream* out) {
  *out << array.count() << " elements of " << to_string(array.dtype) << ", the first is "
       << (array.bytes.empty() ? 0.0F : array.at(0));
}

}  // namespace ziggurat::testing
