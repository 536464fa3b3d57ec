// SPDX-License-Identifier: Apache-2.0
// tests/support/cuda_memory.h: memory where kernels work, for tests that are linked twice: with
// the kernels' host twins over plain memory, and with what stands for a device.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace ziggurat::testing {

/// What each program defines: allocation aligned to 256 bytes, copies that have waited for all that
/// is queued, and another order of blocks and threads.
std::byte* allocate_on_device(std::size_t size_bytes);
void free_on_device(std::byte* memory);
void copy_to_device(std::byte* to, std::span<const std::byte> from);
void copy_from_device(std::span<std::byte> to, const std::byte* from);
void draw_order(std::uint64_t seed);

/// A copy of an array, `offset_bytes` past a multiple of 256, between bytes that are not its own.
class OnDevice {
 public:
  OnDevice(std::span<const std::byte> values, std::size_t offset_bytes)
      : begin_(kGuardBytes + offset_bytes),
        size_bytes_(values.size()),
        memory_(allocate_on_device(begin_ + size_bytes_ + kGuardBytes)) {
    std::vector<std::byte> all(begin_ + size_bytes_ + kGuardBytes, kGuard);
    std::ranges::copy(values, all.begin() + static_cast<std::ptrdiff_t>(begin_));
    copy_to_device(memory_, all);
  }
  template <class T>
  explicit OnDevice(const std::vector<T>& values, std::size_t offset = 0)
      : OnDevice(std::as_bytes(std::span(values)), offset * sizeof(T)) {}
  ~OnDevice() { free_on_device(memory_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  std::span<std::byte> bytes() { return {memory_ + begin_, size_bytes_}; }
  template <class T>
  std::span<T> as() {
    return {reinterpret_cast<T*>(memory_ + begin_), size_bytes_ / sizeof(T)};
  }

  /// What it holds now; the bytes around it must be as they were.
  std::vector<std::byte> read() {
    std::vector<std::byte> all(begin_ + size_bytes_ + kGuardBytes);
    copy_from_device(all, memory_);
    const std::span<const std::byte> span = all;
    const auto is_guard = [](std::byte byte) { return byte == kGuard; };
    EXPECT_TRUE(std::ranges::all_of(span.first(begin_), is_guard)) << "written in front of it";
    EXPECT_TRUE(std::ranges::all_of(span.subspan(begin_ + size_bytes_), is_guard))
        << "written behind it";
    const auto own = span.subspan(begin_, size_bytes_);
    return {own.begin(), own.end()};
  }

 private:
  static constexpr std::size_t kGuardBytes = 256;
  static constexpr std::byte kGuard{0x5a};
  std::size_t begin_, size_bytes_;
  std::byte* memory_;
};

/// Bytes that differ, and where the first one is.
inline ::testing::AssertionResult same_bytes(std::span<const std::byte> got,
                                             std::span<const std::byte> want) {
  if (got.size() != want.size()) return ::testing::AssertionFailure() << "other sizes";
  std::size_t differ = 0, first = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] == want[i]) continue;
    if (differ++ == 0) first = i;
  }
  if (differ == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << differ << " of " << got.size() << " bytes differ, the first at " << first;
}

}  // namespace ziggurat::testing
