// SPDX-License-Identifier: Apache-2.0
// optimizer/update_scalar.cc: the specification of an update: every element by its rule
// (optimizers.h) in its format (slice_element.h), one after the other. Other targets are compared
// with it, bit for bit.
#include <span>

#include "optimizer/kernels.h"
#include "optimizer/slice_element.h"

namespace ziggurat::internal::scalar {
namespace {

/// Decodes blocks, updates them as fp32 and encodes them, block by block.
void update_blocks(const OptimizerStep& step, const Slice& slice, std::size_t moments) {
  for (std::size_t begin = 0; begin < slice.count; begin += kEightBitBlock) {
    const Slice codes = part_of(slice, begin, begin + kEightBitBlock);
    Slice block = codes;
    block.format = decoded(slice.format);
    float values[kMomentsMax][kEightBitBlock];
    const auto codes_of = [&](std::size_t k) {
      return std::span(reinterpret_cast<std::uint8_t*>(codes.moments[k]), kEightBitBlock);
    };
    for (std::size_t k = 0; k < moments; ++k) {
      scalar::decode_eight_bit(moment_code(step.kind, k), codes_of(k), codes.scales[k], values[k]);
      block.moments[k] = reinterpret_cast<std::byte*>(values[k]);
    }
    scalar::update(step, block);
    for (std::size_t k = 0; k < moments; ++k)
      scalar::encode_eight_bit(moment_code(step.kind, k), values[k], codes_of(k), codes.scales[k]);
  }
}

}  // namespace

void update(const OptimizerStep& step, const Slice& slice) {
  if (has_codes(slice.format)) return update_blocks(step, slice, moment_count(step.kind));
  const Drawn drawn = drawn_by(slice.format, step.rounding);
  for (std::size_t i = 0; i < slice.count; ++i) {
    const auto index = slice.noise_index + static_cast<std::uint32_t>(i);
    update_element(step, slice, i, noise_of(drawn, slice.noise_key, index));
  }
}

}  // namespace ziggurat::internal::scalar
