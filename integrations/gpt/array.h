// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/array.h: arrays of parameters and activations by address. Their element type is
// known only at run time, and pointer arithmetic counts elements. Only the kernels read the values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/dtype.h"
#include "base/typed_span.h"

namespace ziggurat::gpt {

/// An array of elements; Byte is std::byte or const std::byte.
template <class Byte>
struct BasicArray {
  template <class T>
  using Element = std::conditional_t<std::is_const_v<Byte>, const T, T>;

  BasicArray() = default;
  BasicArray(DType type, Byte* first) : dtype(type), data(first) {}
  /// Makes an array of 16-bit elements, which are bf16 unless `type` says otherwise.
  BasicArray(Element<bf16>* first, DType type = DType::kBFloat16)  // NOLINT: converts
      : BasicArray(type, reinterpret_cast<Byte*>(first)) {}
  BasicArray(Element<float>* first)  // NOLINT: converts
      : BasicArray(DType::kFloat32, reinterpret_cast<Byte*>(first)) {}
  BasicArray(const TypedSpan<Byte>& span)  // NOLINT: converts
      : BasicArray(span.dtype, span.bytes.data()) {}
  operator BasicArray<const std::byte>() const noexcept
    requires(!std::is_const_v<Byte>)
  {
    return {dtype, data};
  }

  explicit operator bool() const noexcept { return data != nullptr; }
  BasicArray operator+(std::int64_t elements) const noexcept {
    return {dtype, data + elements * static_cast<std::int64_t>(size_bytes(dtype))};
  }

  DType dtype = DType::kBFloat16;
  Byte* data = nullptr;
};

using Array = BasicArray<std::byte>;
using ConstArray = BasicArray<const std::byte>;

}  // namespace ziggurat::gpt
