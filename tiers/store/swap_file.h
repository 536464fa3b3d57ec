// SPDX-License-Identifier: Apache-2.0
// tiers/store/swap_file.h: space on NVMe for state that need not survive the process (parameters
// and gradients placed on NVMe): an unnamed file per drive with its space reserved. Each item's
// hash is kept in memory, so that a wrong byte is never used. Reactor's thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "aio/direct_file.h"
#include "base/error.h"
#include "tiers/store/striping.h"

namespace ziggurat {

class SwapFile {
 public:
  /// Makes the files. `item_bytes` has the size of each item; assign_stripes() chooses the places
  /// of items. Errors: as assign_stripes(), and errno's.
  static std::unique_ptr<SwapFile> create(Reactor& reactor, std::vector<StripePlace> places,
                                          std::vector<std::uint64_t> item_bytes);

  Task<> write(std::size_t item, std::span<const std::byte> bytes, std::uint64_t hash,
               IoPriority priority = IoPriority::kDemand);
  Task<> read(std::size_t item, std::span<std::byte> bytes,
              IoPriority priority = IoPriority::kDemand);
  /// Raises transfers by IoEngine::raise() on every drive.
  void raise(std::span<const std::byte> memory, IoPriority priority);
  /// Returns the hash given with the last write of `item`, which the caller compares (seed: the
  /// item's number).
  std::uint64_t expected_hash(std::size_t item) const;
  /// Whether the item was ever written. Until then there is nothing to read.
  bool is_written(std::size_t item) const noexcept { return written_[item]; }
  Error corrupt_item(std::size_t item) const;

 private:
  SwapFile(std::vector<std::uint64_t> item_bytes, std::vector<std::uint32_t> stripes);
  DirectFile& file(std::size_t item) const noexcept { return *files_[stripes_[item]]; }
  std::vector<std::unique_ptr<DirectFile>> files_;  // by stripe
  std::vector<std::uint64_t> item_bytes_;
  std::vector<std::uint32_t> stripes_;
  std::vector<std::uint64_t> offsets_;
  std::vector<std::uint64_t> hashes_;
  std::vector<bool> written_;
};

}  // namespace ziggurat
