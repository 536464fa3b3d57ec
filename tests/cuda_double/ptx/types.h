// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/types.h: from the name of a type in PTX to the type in C++.
#pragma once

#include <cstdint>
#include <string_view>

#include "tests/cuda_double/ptx/program.h"

namespace ziggurat::cuda_double::ptx {

/// .f16 and .bf16: bits, converted where they are used.
struct Half {
  std::uint16_t bits;
};
struct Bfloat {
  std::uint16_t bits;
};

/// make(T{}) for .u16, .s16, .b16 to 64 bits; null for other types.
template <class Make>
Handler for_integer(std::string_view type, Make make) {
  if (type == "u16" || type == "b16") return make(std::uint16_t{});
  if (type == "s16") return make(std::int16_t{});
  if (type == "u32" || type == "b32") return make(std::uint32_t{});
  if (type == "s32") return make(std::int32_t{});
  if (type == "u64" || type == "b64") return make(std::uint64_t{});
  if (type == "s64") return make(std::int64_t{});
  return nullptr;
}

/// The same by size alone.
template <class Make>
Handler for_bits(std::string_view type, Make make) {
  if (type.empty() || type == "pred") return nullptr;
  const std::string_view bits = type.substr(type.find_first_of("0123456789"));
  if (bits == "16") return make(std::uint16_t{});
  if (bits == "32") return make(std::uint32_t{});
  if (bits == "64") return make(std::uint64_t{});
  return nullptr;
}

template <class Make>
Handler for_float(std::string_view type, Make make) {
  if (type == "f32") return make(float{});
  if (type == "f64") return make(double{});
  return nullptr;
}

}  // namespace ziggurat::cuda_double::ptx
