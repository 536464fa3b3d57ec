// SPDX-License-Identifier: Apache-2.0
// optimizer/gradient_scalar.cc: the specification of rounding a gradient and of summing its
// squares.
#include <cstring>

#include "optimizer/kernels.h"

namespace ziggurat::internal::scalar {
namespace {

/// memcpy, because `out` may be the memory of `values` under another type: the compiler must not
/// move a load past a store.
float load(const float* from) {
  float value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

void store(bf16* to, bf16 value) { std::memcpy(to, &value, sizeof(value)); }

}  // namespace

void round_to_bf16(const float* values, bf16* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) store(out + i, float_to_bf16(load(values + i)));
}

void round_and_square(const float* values, bf16* out, std::size_t count, float* lanes) {
  for (std::size_t i = 0; i < count; ++i) {
    const bf16 rounded = float_to_bf16(load(values + i));
    store(out + i, rounded);
    const float widened = bf16_to_float(rounded);
    const float square = widened * widened;
    lanes[i % kSumLanes] = lanes[i % kSumLanes] + square;
  }
}

}  // namespace ziggurat::internal::scalar
