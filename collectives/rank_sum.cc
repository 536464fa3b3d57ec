// SPDX-License-Identifier: Apache-2.0
// collectives/rank_sum.cc: sums as they are specified.
#include "collectives/rank_sum.h"

#include <algorithm>
#include <cstring>

#include "base/numerics/float16.h"
#include "base/numerics/rounding.h"
#include "collectives/communicator.h"

namespace ziggurat {
namespace {

template <class T>
T load(const std::byte* values, std::size_t i) {
  T value;
  std::memcpy(&value, values + i * sizeof(T), sizeof(T));
  return value;
}
template <class T>
void store(T value, std::byte* values, std::size_t i) {
  std::memcpy(values + i * sizeof(T), &value, sizeof(T));
}

float widened(const std::byte* values, DType dtype, std::size_t i) {
  switch (dtype) {
    case DType::kFloat32: return load<float>(values, i);
    case DType::kBFloat16: return bf16_to_float(load<bf16>(values, i));
    case DType::kFloat16: return fp16_to_float(load<fp16>(values, i));
  }
  return 0;
}

template <class Value>
Value combined(Value a, Value b, Communicator::Op op) {
  switch (op) {
    case Communicator::Op::kSum: return a + b;
    case Communicator::Op::kMin: return std::min(a, b);
    case Communicator::Op::kMax: return std::max(a, b);
  }
  return a;
}

template <class Value>
void combine(std::span<const std::byte* const> contributions, const CallSpec& spec,
             std::byte* result) {
  for (std::size_t i = 0; i < spec.count; ++i) {
    Value total = load<Value>(contributions[0], i);
    for (std::size_t r = 1; r < contributions.size(); ++r) {
      total =
          combined(total, load<Value>(contributions[r], i), static_cast<Communicator::Op>(spec.op));
    }
    store(total, result, i);
  }
}

}  // namespace

void combine_in_rank_order(std::span<const std::byte* const> contributions, const CallSpec& spec,
                           std::byte* result) {
  if (spec.element == Element::kFloat64) return combine<double>(contributions, spec, result);
  combine<std::uint64_t>(contributions, spec, result);
}

void scalar::sum_in_rank_order(std::span<const std::byte* const> contributions, DType dtype,
                               std::size_t first, std::size_t count, std::byte* sum) {
  for (std::size_t i = first; i < count; ++i) {
    float total = widened(contributions[0], dtype, i);
    for (std::size_t r = 1; r < contributions.size(); ++r) {
      total += widened(contributions[r], dtype, i);
    }
    total = quiet(total);
    switch (dtype) {
      case DType::kFloat32: store(total, sum, i); break;
      case DType::kBFloat16: store(float_to_bf16(total), sum, i); break;
      case DType::kFloat16: store(float_to_fp16(total), sum, i); break;
    }
  }
}

}  // namespace ziggurat
