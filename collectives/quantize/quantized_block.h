// SPDX-License-Identifier: Apache-2.0
// collectives/quantize/quantized_block.h: the sizes of the blocks of quantize.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ziggurat {

enum class QuantizedBits : std::uint8_t { k4 = 4, k8 = 8 };

inline constexpr std::size_t kQuantizedBlock = 256;

/// Returns the encoded bytes of `count` elements: 1.016 per element in 8 bits, 0.516 in 4.
constexpr std::uint64_t quantized_bytes(QuantizedBits bits, std::uint64_t count) noexcept {
  const std::uint64_t rest = count % kQuantizedBlock;
  const auto codes = [bits](std::uint64_t elements) {
    return bits == QuantizedBits::k8 ? elements : (elements + 1) / 2;
  };
  return count / kQuantizedBlock * (sizeof(float) + codes(kQuantizedBlock)) +
         (rest == 0 ? 0 : sizeof(float) + codes(rest));
}

/// Returns the largest error of an element, as a share of its block's largest magnitude. The
/// rounding to the type of the values adds to it.
constexpr double quantization_error(QuantizedBits bits) noexcept {
  return (0.5 + 0x1p-12) / (bits == QuantizedBits::k8 ? 127 : 7);
}

}  // namespace ziggurat
