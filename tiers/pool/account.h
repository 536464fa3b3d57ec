// SPDX-License-Identifier: Apache-2.0
// tiers/pool/account.h: how many bytes of a tier are used for each purpose, now and at the peak.
// Reactor's thread, or under the owner's lock.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace ziggurat {

/// The purpose of bytes. The account in an out-of-memory message and in the end table has one entry
/// for each.
enum class Purpose : std::uint8_t {
  kParams,        ///< parameters
  kGradients,     ///< gradients on their way to the update
  kAccumulators,  ///< fp32 gradient accumulators
  kOptimizer,     ///< records: master, exp_avg, exp_avg_sq
  kKeptRecords,   ///< NVMe-placed records that are kept in host memory from sweep to sweep
  kActivations,   ///< boundary activations and workspace of the trainer
  kStaging,       ///< bytes in transit, tables, blobs
  kCount,
};

std::string_view to_string(Purpose purpose) noexcept;

class Account {
 public:
  explicit Account(std::uint64_t capacity_bytes) : capacity_bytes_(capacity_bytes) {}

  void add(Purpose purpose, std::uint64_t size_bytes) noexcept;
  void subtract(Purpose purpose, std::uint64_t size_bytes) noexcept;

  std::uint64_t capacity_bytes() const noexcept { return capacity_bytes_; }
  std::uint64_t used_bytes() const noexcept { return used_bytes_; }
  std::uint64_t peak_bytes() const noexcept { return peak_bytes_; }
  std::uint64_t used_bytes(Purpose purpose) const noexcept;
  std::uint64_t peak_bytes(Purpose purpose) const noexcept;

  /// Formats the account: "params 164.1 MiB, gradients 12.0 MiB, ... of 384.0 MiB", with the
  /// purposes that hold something, largest first.
  std::string text() const;

 private:
  std::uint64_t capacity_bytes_;
  std::uint64_t used_bytes_ = 0;
  std::uint64_t peak_bytes_ = 0;
  std::array<std::uint64_t, static_cast<std::size_t>(Purpose::kCount)> used_by_{};
  std::array<std::uint64_t, static_cast<std::size_t>(Purpose::kCount)> peak_by_{};
};

}  // namespace ziggurat
