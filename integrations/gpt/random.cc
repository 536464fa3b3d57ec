// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/random.cc: normal values without libm, which differs between machines.
#include "integrations/gpt/random.h"

#include <bit>
#include <cmath>
#include <cstddef>

namespace ziggurat::gpt {
namespace {

struct SinCos {
  double sin;
  double cos;
};

// Returns sine and cosine for `turns` in [0, 1): reduces to an eighth of a turn around the nearest
// quarter, then uses Taylor polynomials (error below 1e-10).
SinCos sin_cos_of_turns(double turns) noexcept {
  constexpr double kHalfPi = 1.57079632679489661923;
  const double quarters = turns * 4.0;
  const auto nearest = static_cast<int>(quarters + 0.5);
  const double x = (quarters - nearest) * kHalfPi;
  const double x2 = x * x;
  const double s =
      x * (1.0 + x2 * (-1.0 / 6 +
                       x2 * (1.0 / 120 +
                             x2 * (-1.0 / 5040 + x2 * (1.0 / 362880 + x2 * (-1.0 / 39916800))))));
  const double c =
      1.0 +
      x2 * (-0.5 +
            x2 * (1.0 / 24 + x2 * (-1.0 / 720 +
                                   x2 * (1.0 / 40320 + x2 * (-1.0 / 3628800 + x2 / 479001600.0)))));
  switch (nearest & 3) {
    case 0: return {s, c};
    case 1: return {c, -s};
    case 2: return {-s, -c};
    default: return {-c, s};
  }
}

struct Pair {
  float values[2];
};

Pair normal_pair(std::uint64_t key, std::uint64_t pair) noexcept {
  constexpr double kTwoToMinus32 = 1.0 / 4294967296.0;
  const std::uint64_t bits = mix64(key ^ mix64(pair));
  const double radius_uniform = (static_cast<double>(bits >> 32) + 1.0) * kTwoToMinus32;  // (0, 1]
  const double angle_uniform = static_cast<double>(bits & 0xffffffffu) * kTwoToMinus32;   // [0, 1)
  const double radius = std::sqrt(-2.0 * portable_log(radius_uniform));
  const SinCos angle = sin_cos_of_turns(angle_uniform);
  return {{static_cast<float>(radius * angle.cos), static_cast<float>(radius * angle.sin)}};
}

}  // namespace

double portable_log(double value) noexcept {
  constexpr double kLn2 = 0.69314718055994530942;
  const auto bits = std::bit_cast<std::uint64_t>(value);
  auto exponent = static_cast<std::int64_t>(bits >> 52) - 1023;
  double mantissa =
      std::bit_cast<double>((bits & 0xfffffffffffffu) | 0x3ff0000000000000u);  // [1, 2)
  if (mantissa > 1.41421356237309504880) {
    mantissa *= 0.5;
    ++exponent;
  }
  // Uses log m = 2 atanh((m - 1) / (m + 1)), whose argument is at most 0.172.
  const double s = (mantissa - 1.0) / (mantissa + 1.0);
  const double s2 = s * s;
  const double series =
      1.0 +
      s2 * (1.0 / 3 +
            s2 * (1.0 / 5 +
                  s2 * (1.0 / 7 + s2 * (1.0 / 9 + s2 * (1.0 / 11 + s2 * (1.0 / 13 + s2 / 15))))));
  return static_cast<double>(exponent) * kLn2 + 2.0 * s * series;
}

void fill_normal(std::uint64_t key, std::uint64_t first, std::span<float> values) noexcept {
  std::size_t i = 0;
  if (first % 2 == 1 && !values.empty()) values[i++] = normal_pair(key, first / 2).values[1];
  for (; i + 1 < values.size(); i += 2) {
    const Pair pair = normal_pair(key, (first + i) / 2);
    values[i] = pair.values[0];
    values[i + 1] = pair.values[1];
  }
  if (i < values.size()) values[i] = normal_pair(key, (first + i) / 2).values[0];
}

}  // namespace ziggurat::gpt
