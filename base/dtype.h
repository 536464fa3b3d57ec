// SPDX-License-Identifier: Apache-2.0
// base/dtype.h: the element types of training state, and the one rounding from fp32 to bf16.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace ziggurat {

enum class DType : std::uint8_t { kFloat32, kBFloat16, kFloat16 };

constexpr std::size_t size_bytes(DType dtype) noexcept { return dtype == DType::kFloat32 ? 4 : 2; }

constexpr std::string_view to_string(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32: return "fp32";
    case DType::kBFloat16: return "bf16";
    case DType::kFloat16: return "fp16";
  }
  return "?";
}

/// The names that to_string() gives, the usual choice first.
inline constexpr std::array<std::string_view, 3> kDTypeNames{"bf16", "fp16", "fp32"};
constexpr std::optional<DType> parse_dtype(std::string_view name) noexcept {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    if (name == to_string(dtype)) return dtype;
  }
  return std::nullopt;
}

/// A bf16 value: the upper half of an IEEE binary32.
using bf16 = std::uint16_t;

constexpr float bf16_to_float(bf16 value) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16);
}

/// Rounds to nearest, ties away from zero, by integer arithmetic: the same on every machine,
/// denormals kept, and a bijection together with the 16-bit residual. NaN stays NaN (made quiet).
constexpr bf16 float_to_bf16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 0x0040u);
  return static_cast<bf16>((bits + 0x8000u) >> 16);
}

}  // namespace ziggurat
