// SPDX-License-Identifier: Apache-2.0
// tests/support/typed_values.h: single elements of arrays whose type is known at run time only.
#pragma once

#include <cstddef>

#include "base/numerics/float16.h"
#include "base/typed_span.h"

namespace ziggurat::testing {

/// Element `i`, widened.
inline float value_at(const TypedSpan<const std::byte>& values, std::size_t i) {
  switch (values.dtype) {
    case DType::kBFloat16: return bf16_to_float(values.as<bf16>()[i]);
    case DType::kFloat16: return fp16_to_float(values.as<fp16>()[i]);
    case DType::kFloat32: break;
  }
  return values.as<float>()[i];
}

}  // namespace ziggurat::testing
