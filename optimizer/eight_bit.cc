// SPDX-License-Identifier: Apache-2.0
// optimizer/eight_bit.cc: the specification of encoding and decoding blocks. Other targets are
// compared with it, bit for bit.
#include "optimizer/eight_bit.h"

#include <algorithm>

#include "optimizer/eight_bit_codes.h"
#include "optimizer/kernels.h"

namespace ziggurat::internal::scalar {

std::uint8_t eight_bit_code(EightBitCode code, float value, float inverse) noexcept {
  return code_of(eight_bit_codes(code), code, value, inverse);
}

void decode_eight_bit(EightBitCode code, std::span<const std::uint8_t> codes, const float* scales,
                      float* values) {
  const EightBitValues& table = eight_bit_codes(code).values;
  for (std::size_t i = 0; i < codes.size(); ++i)
    values[i] = table[codes[i]] * scales[i / kEightBitBlock];
}

void encode_eight_bit(EightBitCode code, const float* values, std::span<std::uint8_t> codes,
                      float* scales) {
  const EightBitCodes& tables = eight_bit_codes(code);
  for (std::size_t begin = 0; begin < codes.size(); begin += kEightBitBlock) {
    const std::size_t end = std::min(codes.size(), begin + kEightBitBlock);
    std::uint32_t largest = 0;
    for (std::size_t i = begin; i < end; ++i)
      largest = std::max(largest, magnitude_bits(values[i]));
    const BlockScale block = block_scale(largest);
    scales[begin / kEightBitBlock] = block.scale;
    for (std::size_t i = begin; i < end; ++i)
      codes[i] = code_of(tables, code, values[i], block.inverse);
  }
}

}  // namespace ziggurat::internal::scalar

const std::array<float, 256>& ziggurat::eight_bit_values(EightBitCode code) noexcept {
  return internal::eight_bit_codes(code).values;
}
