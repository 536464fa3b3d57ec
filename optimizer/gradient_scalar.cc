// SPDX-License-Identifier: Apache-2.0
// optimizer/gradient_scalar.cc: the specification of rounding a gradient and of summing its
// squares.
#include <cstring>

#include "base/float16.h"
#include "optimizer/kernels.h"

namespace ziggurat::internal::scalar {
namespace {

/// memcpy, because `out` may be the memory of `values` under another type: the compiler must not
/// move a load past a store.
template <class T>
T load(const void* from, std::size_t i) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(from) + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void store(void* to, std::size_t i, T value) {
  std::memcpy(static_cast<std::byte*>(to) + i * sizeof(T), &value, sizeof(T));
}

}  // namespace

void round_to_bf16(const float* values, bf16* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) store(out, i, float_to_bf16(load<float>(values, i)));
}

float gradient_at(DType dtype, const std::byte* grad, std::size_t i) {
  switch (dtype) {
    case DType::kBFloat16: return bf16_to_float(load<bf16>(grad, i));
    case DType::kFloat16: return fp16_to_float(load<fp16>(grad, i));
    case DType::kFloat32: break;
  }
  return load<float>(grad, i);
}

void round_and_square(const float* values, DType dtype, std::byte* out, std::size_t count,
                      float* lanes) {
  for (std::size_t i = 0; i < count; ++i) {
    const float value = load<float>(values, i);
    switch (dtype) {
      case DType::kBFloat16: store(out, i, float_to_bf16(value)); break;
      case DType::kFloat16: store(out, i, float_to_fp16(value)); break;
      case DType::kFloat32: store(out, i, value); break;
    }
    const float widened = gradient_at(dtype, out, i);
    const float square = widened * widened;
    lanes[i % kSumLanes] = lanes[i % kSumLanes] + square;
  }
}

}  // namespace ziggurat::internal::scalar
