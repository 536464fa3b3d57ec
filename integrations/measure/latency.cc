// SPDX-License-Identifier: Apache-2.0
// integrations/measure/latency.cc: puts latencies into buckets, of which bucket i begins at 2^(i /
// 32) microseconds.
#include "integrations/measure/latency.h"

#include <algorithm>
#include <cmath>

namespace ziggurat::measure {
namespace {

double edge_us(std::size_t index) {
  return std::exp2(static_cast<double>(index) / Latencies::kPerOctave);
}

}  // namespace

void Latencies::add(std::chrono::nanoseconds latency) noexcept {
  const double us = static_cast<double>(latency.count()) / 1e3;
  const double place = us <= 1 ? 0 : std::log2(us) * kPerOctave;
  const auto last = static_cast<double>(counts_.size() - 1);
  ++counts_[static_cast<std::size_t>(std::min(place, last))];
  ++count_;
  max_us_ = std::max(max_us_, us);
}

void Latencies::add(const Latencies& other) noexcept {
  for (std::size_t i = 0; i < counts_.size(); ++i) counts_[i] += other.counts_[i];
  count_ += other.count_;
  max_us_ = std::max(max_us_, other.max_us_);
}

double Latencies::quantile_us(double quantile) const noexcept {
  if (count_ == 0) return 0;
  const auto wanted = static_cast<std::uint64_t>(
      std::max(1.0, std::ceil(quantile * static_cast<double>(count_) - 1e-9)));
  std::uint64_t seen = 0;
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    seen += counts_[i];
    if (seen >= wanted) return std::min(edge_us(i + 1), max_us_);
  }
  return max_us_;
}

std::vector<Latencies::Bucket> Latencies::buckets() const {
  std::vector<Bucket> filled;
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    if (counts_[i] > 0) filled.push_back({edge_us(i), edge_us(i + 1), counts_[i]});
  }
  return filled;
}

}  // namespace ziggurat::measure
