// SPDX-License-Identifier: Apache-2.0
// optimizer/eight_bit.cc: the specification of encoding and decoding, by a table over the upper
// half of a float. Other targets are compared with it, bit for bit.
#include "optimizer/eight_bit.h"

#include <algorithm>
#include <bit>

#include "base/check.h"
#include "optimizer/eight_bit_tables.h"
#include "optimizer/kernels.h"

namespace ziggurat::internal {
namespace {

/// How many thresholds lie below a magnitude in [0, 1]: its rank among the codes from zero up.
/// Floats of one upper half are so close together that at most one threshold lies among them: an
/// entry says the rank of the smallest, and above which lower half it is one more.
class Ranks {
 public:
  explicit Ranks(std::span<const float> thresholds) {
    std::uint32_t rank = 0;
    entries_.fill(kNever);
    std::size_t filled = 0;
    for (const float threshold : thresholds) {
      const auto bits = std::bit_cast<std::uint32_t>(threshold);
      const std::size_t entry = (bits >> 16) - kFirst;
      ZIGGURAT_CHECK(filled <= entry && entry < kEntries, "two codes in entry {}", entry);
      for (; filled <= entry; ++filled) entries_[filled] = kNever | rank;
      entries_[entry] = (bits & 0xffffu) << 16 | rank;
      ++rank;
    }
    for (; filled < kEntries; ++filled) entries_[filled] = kNever | rank;
  }

  std::uint32_t of(std::uint32_t magnitude_bits) const noexcept {
    const std::uint32_t upper = std::clamp(magnitude_bits >> 16, kFirst, kLast);
    const std::uint32_t entry = entries_[upper - kFirst];
    return (entry & 0xffffu) + ((magnitude_bits & 0xffffu) > (entry >> 16) ? 1u : 0u);
  }

 private:
  static constexpr std::uint32_t kNever = 0xffff0000u;
  static constexpr std::uint32_t kFirst = (127u - 23u) << 7;  // 2^-23: below the first middle
  static constexpr std::uint32_t kLast = 127u << 7;           // 1 and what rounding puts above it
  static constexpr std::size_t kEntries = kLast - kFirst + 1;
  std::array<std::uint32_t, kEntries> entries_;
};

const Ranks& ranks_of(EightBitCode code) {
  static const Ranks signed_ranks(eight_bit_tables(EightBitCode::kSigned).thresholds);
  static const Ranks unsigned_ranks(eight_bit_tables(EightBitCode::kUnsigned).thresholds);
  return code == EightBitCode::kSigned ? signed_ranks : unsigned_ranks;
}

std::uint32_t magnitude_bits(float value) {
  return std::bit_cast<std::uint32_t>(value) & 0x7fffffffu;
}

std::uint8_t signed_code(const Ranks& ranks, float value, float inverse) {
  const std::uint32_t rank = ranks.of(magnitude_bits(value * inverse));
  const std::uint32_t negative = std::bit_cast<std::uint32_t>(value) >> 31;
  const std::uint32_t limited = std::min(rank, kSignedZero + 1 - negative);  // no code of -1
  // Zero's place plus or minus the rank, without a branch: signs are as good as random.
  return static_cast<std::uint8_t>(kSignedZero + ((limited ^ (0u - negative)) + negative));
}

std::uint8_t unsigned_code(const Ranks& ranks, float value, float inverse) {
  if (!(value > 0.0f)) return 0;
  return static_cast<std::uint8_t>(std::max(1u, ranks.of(magnitude_bits(value * inverse))));
}

}  // namespace

namespace scalar {

std::uint8_t eight_bit_code(EightBitCode code, float value, float inverse) noexcept {
  const Ranks& ranks = ranks_of(code);
  return code == EightBitCode::kSigned ? signed_code(ranks, value, inverse)
                                       : unsigned_code(ranks, value, inverse);
}

void decode_eight_bit(EightBitCode code, std::span<const std::uint8_t> codes, const float* scales,
                      float* values) {
  const std::array<float, 256>& table = eight_bit_tables(code).values;
  for (std::size_t i = 0; i < codes.size(); ++i)
    values[i] = table[codes[i]] * scales[i / kEightBitBlock];
}

void encode_eight_bit(EightBitCode code, const float* values, std::span<std::uint8_t> codes,
                      float* scales) {
  const Ranks& ranks = ranks_of(code);
  for (std::size_t begin = 0; begin < codes.size(); begin += kEightBitBlock) {
    const std::size_t end = std::min(codes.size(), begin + kEightBitBlock);
    std::uint32_t largest = 0;  // magnitudes are in the order of their bits, NaN above infinity
    for (std::size_t i = begin; i < end; ++i)
      largest = std::max(largest, magnitude_bits(values[i]));
    const BlockScale block = block_scale(largest);
    scales[begin / kEightBitBlock] = block.scale;
    for (std::size_t i = begin; i < end; ++i) {
      codes[i] = code == EightBitCode::kSigned ? signed_code(ranks, values[i], block.inverse)
                                               : unsigned_code(ranks, values[i], block.inverse);
    }
  }
}

}  // namespace scalar
}  // namespace ziggurat::internal

const std::array<float, 256>& ziggurat::eight_bit_values(EightBitCode code) noexcept {
  return internal::eight_bit_tables(code).values;
}
