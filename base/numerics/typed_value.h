// SPDX-License-Identifier: Apache-2.0
// base/numerics/typed_value.h: one element of an array whose type is known at run time only: the
// specification that kernels over such arrays are compared with.
#pragma once

#include <cstddef>
#include <cstring>

#include "base/dtype.h"
#include "base/numerics/float16.h"

namespace ziggurat {

/// Element `i` of an array of `dtype`, widened exactly. `values` needs no alignment.
inline float value_at(DType dtype, const std::byte* values, std::size_t i) noexcept {
  // memcpy, because an array may be written in place under another type: the compiler must not move
  // a load past a store.
  const auto load = [&](auto element) {
    std::memcpy(&element, values + i * sizeof(element), sizeof(element));
    return element;
  };
  switch (dtype) {
    case DType::kBFloat16: return bf16_to_float(load(bf16{}));
    case DType::kFloat16: return fp16_to_float(load(fp16{}));
    case DType::kFloat32: break;
  }
  return load(float{});
}

/// Rounds `value` to `dtype` and stores it as element `i`. bf16: nearest, ties away from zero;
/// fp16: nearest, ties to even.
inline void store_value(DType dtype, std::byte* values, std::size_t i, float value) noexcept {
  const auto store = [&](auto element) {
    std::memcpy(values + i * sizeof(element), &element, sizeof(element));
  };
  switch (dtype) {
    case DType::kBFloat16: return store(float_to_bf16(value));
    case DType::kFloat16: return store(float_to_fp16(value));
    case DType::kFloat32: return store(value);
  }
}

}  // namespace ziggurat
