// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/random.h: random numbers as functions of a key and a counter. They have no state
// to save, and any range can be made on its own.
#pragma once

#include <cstdint>
#include <span>

namespace ziggurat::gpt {

/// Maps 64 bits to 64 bits, one to one. Its outputs look independent for consecutive inputs
/// (splitmix64's finalizer, Steele et al. 2014).
constexpr std::uint64_t mix64(std::uint64_t value) noexcept {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

/// Fills in the standard normal values of counters [first, first + values.size()). Uses Box-Muller
/// over pairs of counters, with its own logarithm, sine and cosine in double (+ - x / and sqrt
/// only), so the bits are the same on every machine.
void fill_normal(std::uint64_t key, std::uint64_t first, std::span<float> values) noexcept;

/// Returns the natural logarithm of a positive normal number, by the same arithmetic; its relative
/// error is below 1e-12.
double portable_log(double value) noexcept;

}  // namespace ziggurat::gpt
