// SPDX-License-Identifier: Apache-2.0
// optimizer/gradient.cc: sums squares in an order that no instruction set changes, and computes the
// clip coefficient.
#include "optimizer/gradient.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/numerics/typed_value.h"
#include "optimizer/gradient_rules.h"
#include "optimizer/kernels.h"
#include "optimizer/square_sum.h"

namespace ziggurat {
double round_gradient(std::span<const float> accumulator, TypedSpan<std::byte> out) noexcept {
  ZIGGURAT_CHECK(out.count() == accumulator.size(), "{} values into {} places", accumulator.size(),
                 out.count());
  double sum = 0.0;
  for (std::size_t begin = 0; begin < accumulator.size(); begin += internal::kSumBlock) {
    const std::size_t count = std::min(internal::kSumBlock, accumulator.size() - begin);
    float lanes[internal::kSumLanes] = {};
    std::byte* const to = out.bytes.data() + begin * size_bytes(out.dtype);
    internal::round_and_square(accumulator.data() + begin, out.dtype, to, count, lanes);
    sum = sum + internal::block_sum(lanes, out.dtype, to, count);
  }
  return internal::quiet_sum(sum);
}

void round_to_bf16(std::span<const float> values, std::span<bf16> out) noexcept {
  ZIGGURAT_CHECK(out.size() == values.size(), "{} values into {} places", values.size(),
                 out.size());
  internal::round_to_bf16(values.data(), out.data(), values.size());
}

void round_params(std::span<const float> masters, TypedSpan<std::byte> out) noexcept {
  ZIGGURAT_CHECK(out.count() == masters.size(), "{} masters into {} places", masters.size(),
                 out.count());
  switch (out.dtype) {
    case DType::kBFloat16: return round_to_bf16(masters, out.as<bf16>());
    case DType::kFloat16: {
      float squares[internal::kSumLanes] = {};
      return internal::round_and_square(masters.data(), out.dtype, out.bytes.data(), masters.size(),
                                        squares);
    }
    case DType::kFloat32: std::memcpy(out.bytes.data(), masters.data(), out.bytes.size()); return;
  }
}

void accumulate_gradient(TypedSpan<const std::byte> values, float scale,
                         std::span<float> sums) noexcept {
  ZIGGURAT_CHECK(values.count() == sums.size(), "{} values into {} sums", values.count(),
                 sums.size());
  for (std::size_t i = 0; i < sums.size(); ++i)
    sums[i] = internal::accumulated(sums[i], value_at(values.dtype, values.bytes.data(), i), scale);
}

void widen(TypedSpan<const std::byte> values, std::span<float> out) noexcept {
  ZIGGURAT_CHECK(values.count() == out.size(), "{} values into {} places", values.count(),
                 out.size());
  for (std::size_t i = 0; i < out.size(); ++i)
    out[i] = value_at(values.dtype, values.bytes.data(), i);
}

bool scale_gradient(TypedSpan<std::byte> values, float factor) noexcept {
  bool finite = true;
  std::byte* const bytes = values.bytes.data();
  for (std::size_t i = 0; i < values.count(); ++i)
    finite &= internal::scale_at(value_at(values.dtype, bytes, i), factor, values.dtype, bytes, i);
  return finite;
}

float clip_coefficient(double norm, float clip_norm) noexcept {
  if (clip_norm == 0.0f) return 1.0f;
  const double coefficient = static_cast<double>(clip_norm) / (norm + 1e-6);
  return static_cast<float>(coefficient > 1.0 ? 1.0 : coefficient);  // NaN stays NaN, as in torch
}

}  // namespace ziggurat
