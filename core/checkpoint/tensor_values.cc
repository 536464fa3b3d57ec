// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/tensor_values.cc: widens 16 bits to 32, whatever their alignment.
#include "core/checkpoint/tensor_values.h"

#include <cstdint>
#include <cstring>

#include "base/numerics/float16.h"

namespace ziggurat {

void widen(TensorType type, std::span<const std::byte> bytes, std::span<float> values) {
  if (type == TensorType::kF32) return void(std::memcpy(values.data(), bytes.data(), bytes.size()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, bytes.data() + i * sizeof(bits), sizeof(bits));
    values[i] = type == TensorType::kBF16 ? bf16_to_float(bits) : fp16_to_float(bits);
  }
}

}  // namespace ziggurat
