// SPDX-License-Identifier: Apache-2.0
// integrations/measure/latency.h: counts latencies in logarithmic buckets, 32 per octave (about 2 %
// wide), from a microsecond to a minute.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <vector>

namespace ziggurat::measure {

class Latencies {
 public:
  static constexpr int kPerOctave = 32;
  static constexpr int kOctaves = 26;

  void add(std::chrono::nanoseconds latency) noexcept;
  void add(const Latencies& other) noexcept;

  std::uint64_t count() const noexcept { return count_; }
  double max_us() const noexcept { return max_us_; }
  /// Returns the upper edge of the bucket that holds the share `quantile` (0.5, 0.99, ...), but
  /// never more than the largest latency seen; 0 if nothing was added.
  double quantile_us(double quantile) const noexcept;

  struct Bucket {
    double from_us;
    double to_us;
    std::uint64_t count;
  };
  /// Returns the buckets that are not empty, in order.
  std::vector<Bucket> buckets() const;

 private:
  std::array<std::uint64_t, static_cast<std::size_t>(kPerOctave* kOctaves)> counts_{};
  std::uint64_t count_ = 0;
  double max_us_ = 0;
};

}  // namespace ziggurat::measure
