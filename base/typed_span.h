// SPDX-License-Identifier: Apache-2.0
// base/typed_span.h: elements of a type that is known only at run time.
#pragma once

#include <cstddef>
#include <span>
#include <type_traits>

#include "base/check.h"
#include "base/dtype.h"

namespace ziggurat {

/// A span of elements with their type. Byte is std::byte or const std::byte.
template <class Byte>
struct TypedSpan {
  DType dtype = DType::kBFloat16;
  std::span<Byte> bytes{};

  std::size_t count() const noexcept { return bytes.size() / size_bytes(dtype); }
  TypedSpan subspan(std::size_t first, std::size_t elements) const noexcept {
    return {dtype, bytes.subspan(first * size_bytes(dtype), elements * size_bytes(dtype))};
  }
  operator TypedSpan<const std::byte>() const noexcept
    requires(!std::is_const_v<Byte>)
  {
    return {dtype, bytes};
  }

  /// Returns the elements as bf16, fp16 or float: a type of `dtype`'s size.
  template <class T>
  auto as() const noexcept {
    using Element = std::conditional_t<std::is_const_v<Byte>, const T, T>;
    ZIGGURAT_CHECK(sizeof(T) == size_bytes(dtype), "{} cannot be read as elements of {} bytes",
                   to_string(dtype), sizeof(T));
    return std::span<Element>(reinterpret_cast<Element*>(bytes.data()), count());
  }
};

/// Makes a typed span. 16-bit elements are bf16 unless `dtype` says otherwise.
inline TypedSpan<const std::byte> as_typed(std::span<const bf16> values,
                                           DType dtype = DType::kBFloat16) {
  return {dtype, std::as_bytes(values)};
}
inline TypedSpan<std::byte> as_typed(std::span<bf16> values, DType dtype = DType::kBFloat16) {
  return {dtype, std::as_writable_bytes(values)};
}
inline TypedSpan<const std::byte> as_typed(std::span<const float> values) {
  return {DType::kFloat32, std::as_bytes(values)};
}
inline TypedSpan<std::byte> as_typed(std::span<float> values) {
  return {DType::kFloat32, std::as_writable_bytes(values)};
}

}  // namespace ziggurat
