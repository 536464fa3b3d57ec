// SPDX-License-Identifier: Apache-2.0
// optimizer/typed_span.h: elements of a type that is known at run time only.
#pragma once

#include <cstddef>
#include <span>

#include "base/dtype.h"

namespace ziggurat {

/// Byte is std::byte or const std::byte.
template <class Byte>
struct TypedSpan {
  DType dtype = DType::kBFloat16;
  std::span<Byte> bytes{};

  std::size_t count() const noexcept { return bytes.size() / size_bytes(dtype); }
};

/// 16-bit elements are bf16 unless it is said otherwise.
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
