// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/tensor_type.h: element types of arrays that leave the engine, with their names in
// safetensors.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "base/dtype.h"

namespace ziggurat {

enum class TensorType : std::uint8_t { kF32, kBF16, kF16, kU8 };

constexpr std::size_t size_bytes(TensorType type) noexcept {
  switch (type) {
    case TensorType::kF32: return 4;
    case TensorType::kU8: return 1;
    default: return 2;
  }
}

/// Names of the types, in the order of TensorType.
inline constexpr std::array<std::string_view, 4> kTensorTypeNames{"F32", "BF16", "F16", "U8"};
constexpr std::string_view to_string(TensorType type) noexcept {
  return kTensorTypeNames[static_cast<std::size_t>(type)];
}
constexpr std::optional<TensorType> parse_tensor_type(std::string_view name) noexcept {
  for (std::size_t i = 0; i < kTensorTypeNames.size(); ++i) {
    if (kTensorTypeNames[i] == name) return static_cast<TensorType>(i);
  }
  return std::nullopt;
}

constexpr TensorType tensor_type(DType dtype) noexcept {
  switch (dtype) {
    case DType::kBFloat16: return TensorType::kBF16;
    case DType::kFloat16: return TensorType::kF16;
    case DType::kFloat32: break;
  }
  return TensorType::kF32;
}
/// Returns nothing for codes.
constexpr std::optional<DType> dtype_of(TensorType type) noexcept {
  switch (type) {
    case TensorType::kF32: return DType::kFloat32;
    case TensorType::kBF16: return DType::kBFloat16;
    case TensorType::kF16: return DType::kFloat16;
    case TensorType::kU8: break;
  }
  return std::nullopt;
}

}  // namespace ziggurat
