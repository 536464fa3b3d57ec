// SPDX-License-Identifier: Apache-2.0
// optimizer/eight_bit.cc: the codes, and finding the nearest one by a table over the upper half of
// a float. Plain C++ for every target: one look-up an element is what all of them do.
#include "optimizer/eight_bit.h"

#include <algorithm>
#include <bit>

#include "base/check.h"
#include "optimizer/rounding.h"

namespace ziggurat {
namespace {

constexpr int kDecades = 7;
constexpr std::uint32_t kInfinityBits = 0x7f800000u;
constexpr std::uint32_t kSmallestNormalBits = 0x00800000u;

/// The positive values below 1 and above 0, ascending: in decade i, 2^i of them (signed) or twice
/// as many, the middles of an even cut of [0.1, 1], times 10^(i - 6). Each value is rounded to fp32
/// where PyTorch's tensors round it.
template <class Take>
void for_each_fraction(EightBitCode code, Take&& take) {
  constexpr float kLeast = 0.1f;
  constexpr float kPowers[kDecades] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};
  for (int decade = 0; decade < kDecades; ++decade) {
    const int count = (code == EightBitCode::kSigned ? 1 : 2) << decade;
    const float step = (1.0f - kLeast) / static_cast<float>(count);
    // Exact in double, rounded once; PyTorch's linspace counts from the nearer end.
    const auto boundary = [&](int j) {
      const double wide = step;
      return static_cast<float>(j < (count + 1) / 2 ? static_cast<double>(kLeast) + wide * j
                                                    : 1.0 - wide * (count - j));
    };
    for (int j = 0; j < count; ++j)
      take(kPowers[decade] * ((boundary(j) + boundary(j + 1)) / 2.0f));
  }
}

std::array<float, 256> make_values(EightBitCode code) {
  std::array<float, 256> values{};
  std::size_t count = 0;
  values[count++] = 0.0f;
  values[count++] = 1.0f;
  for_each_fraction(code, [&](float value) {
    values[count++] = value;
    if (code == EightBitCode::kSigned) values[count++] = -value;
  });
  ZIGGURAT_CHECK(count == values.size(), "{} codes", count);
  std::ranges::sort(values);
  return values;
}

/// How many of the points half-way between two codes lie below a magnitude in [0, 1]: its rank
/// among the codes from zero up. Floats of one upper half are so close together that at most one
/// such point lies among them: an entry says the rank of the smallest, and above which lower half
/// it is one more.
class Ranks {
 public:
  explicit Ranks(const std::array<float, 256>& values) {
    const auto zero = std::ranges::find(values, 0.0f);
    std::uint32_t rank = 0;
    entries_.fill(kNever);
    std::size_t filled = 0;
    for (auto code = zero; code + 1 != values.end(); ++code) {
      const double middle = (static_cast<double>(code[0]) + static_cast<double>(code[1])) / 2;
      auto below = static_cast<float>(middle);  // the largest float that is not above
      if (static_cast<double>(below) > middle)
        below = std::bit_cast<float>(std::bit_cast<std::uint32_t>(below) - 1);
      const auto bits = std::bit_cast<std::uint32_t>(below);
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

struct Code {
  std::array<float, 256> values;
  Ranks ranks;
  explicit Code(EightBitCode code) : values(make_values(code)), ranks(values) {}
};

const Code& code_of(EightBitCode code) {
  static const Code signed_code(EightBitCode::kSigned);
  static const Code unsigned_code(EightBitCode::kUnsigned);
  return code == EightBitCode::kSigned ? signed_code : unsigned_code;
}

std::uint32_t magnitude_bits(float value) {
  return std::bit_cast<std::uint32_t>(value) & 0x7fffffffu;
}

constexpr std::uint32_t kSignedZero = 127;  // the place of 0 among the signed codes

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

const std::array<float, 256>& eight_bit_values(EightBitCode code) noexcept {
  return code_of(code).values;
}

void decode_eight_bit(EightBitCode code, std::span<const std::uint8_t> codes, const float* scales,
                      float* values) noexcept {
  const std::array<float, 256>& table = eight_bit_values(code);
  for (std::size_t begin = 0; begin < codes.size(); begin += kEightBitBlock) {
    const float scale = scales[begin / kEightBitBlock];
    const std::size_t end = std::min(codes.size(), begin + kEightBitBlock);
    for (std::size_t i = begin; i < end; ++i) values[i] = table[codes[i]] * scale;
  }
}

void encode_eight_bit(EightBitCode code, const float* values, std::span<std::uint8_t> codes,
                      float* scales) noexcept {
  const Ranks& ranks = code_of(code).ranks;
  for (std::size_t begin = 0; begin < codes.size(); begin += kEightBitBlock) {
    const std::size_t end = std::min(codes.size(), begin + kEightBitBlock);
    std::uint32_t largest = 0;  // magnitudes are in the order of their bits, NaN above infinity
    for (std::size_t i = begin; i < end; ++i)
      largest = std::max(largest, magnitude_bits(values[i]));
    float scale = std::bit_cast<float>(largest);
    if (largest >= kInfinityBits) scale = quiet(scale - scale);
    if (largest < kSmallestNormalBits) scale = 0.0f;
    scales[begin / kEightBitBlock] = scale;
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    for (std::size_t i = begin; i < end; ++i) {
      codes[i] = code == EightBitCode::kSigned ? signed_code(ranks, values[i], inverse)
                                               : unsigned_code(ranks, values[i], inverse);
    }
  }
}

}  // namespace ziggurat
