// SPDX-License-Identifier: Apache-2.0
// tests/support/hard_floats.h: floats that kernels get wrong, and ways to compare bits.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <span>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/numerics/simd_target.h"

namespace ziggurat::testing {

inline float from_bits(std::uint32_t bits) { return std::bit_cast<float>(bits); }
inline std::uint32_t to_bits(float value) { return std::bit_cast<std::uint32_t>(value); }

/// Zeros, denormals, the ends of the range, infinities, and NaNs quiet and signalling, of both
/// signs.
inline constexpr std::array<std::uint32_t, 22> kSpecialBits = {
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x00007fff, 0x00008000, 0x007fffff, 0x807fffff,
    0x00800000, 0x80800000, 0x7f7fffff, 0xff7fffff, 0x7f7f8000, 0x7f800000, 0xff800000, 0x7fc00000,
    0xffc00000, 0x7f800001, 0xff800001, 0x7fffffff, 0xffffffff, 0x7fa12345};

/// About one in eight is special, the rest spread over 60 powers of two.
class HardFloats {
 public:
  explicit HardFloats(std::uint32_t seed) : random_(seed) {}
  float next() {
    const std::uint32_t word = random_();
    if (word % 8 == 0) return from_bits(kSpecialBits[(word >> 8) % kSpecialBits.size()]);
    const float mantissa = 1.0f + static_cast<float>(random_() >> 8) * 0x1p-24f;
    const float value = std::ldexp(mantissa, static_cast<int>(word >> 8) % 60 - 40);
    return (word >> 3) % 2 == 0 ? value : -value;
  }
  std::uint32_t word() { return random_(); }

 private:
  std::mt19937 random_;
};

/// An array whose first element is `offset` elements past a 64-byte boundary.
template <class T>
class OffsetArray {
 public:
  OffsetArray(std::size_t count, std::size_t offset)
      : count_(count),
        offset_(offset),
        memory_(static_cast<T*>(::operator new(bytes(), std::align_val_t{64}))) {
    std::memset(memory_.get(), 0x5a, bytes());
  }
  T* data() { return memory_.get() + offset_; }
  std::span<T> span() { return {data(), count_}; }
  std::span<T> first(std::size_t count) { return {data(), count}; }
  void assign(std::span<const T> values) {
    if (!values.empty()) std::memcpy(data(), values.data(), values.size_bytes());
  }

 private:
  struct Free {
    void operator()(T* memory) const { ::operator delete(memory, std::align_val_t{64}); }
  };
  std::size_t bytes() const { return (count_ + offset_ + 1) * sizeof(T); }
  std::size_t count_, offset_;
  std::unique_ptr<T, Free> memory_;
};

template <class T>
bool same_bits(std::span<const T> a, std::span<const T> b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}

/// Runs `body` with each target in force, the specification among them.
template <class Body>
void for_each_target(Body&& body) {
  for (const std::string_view target : simd_targets()) {
    SCOPED_TRACE(target);
    force_simd_target(target);
    body();
    if (::testing::Test::HasFatalFailure()) break;
  }
  force_simd_target({});
}

}  // namespace ziggurat::testing
