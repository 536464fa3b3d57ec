// SPDX-License-Identifier: Apache-2.0
// tiers/swap_file.h: NVMe space for state that need not survive (parameters and gradients
// placed on NVMe): an unnamed file per drive, its space reserved, with each item's hash kept in
// memory so that a wrong byte is never used. Reactor's thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "aio/direct_file.h"
#include "base/error.h"
#include "tiers/striping.h"

namespace ziggurat {

class SwapFile {
 public:
  /// `item_bytes`: size of each item; items go to the places as assign_stripes() says, which see
  /// for errors.
  static std::unique_ptr<SwapFile> create(Reactor& reactor, std::vector<StripePlace> places,
                                          std::vector<std::uint64_t> item_bytes);

  Task<> write(std::size_t item, std::span<const std::byte> bytes, std::uint64_t hash,
               IoPriority priority = IoPriority::kDemand);
  Task<> read(std::size_t item, std::span<std::byte> bytes,
              IoPriority priority = IoPriority::kDemand);
  /// IoEngine::raise() on every drive.
  void raise(std::span<const std::byte> memory, IoPriority priority);
  /// Hash given with the last write of `item`; the caller compares (seed: the item's number).
  std::uint64_t expected_hash(std::size_t item) const;
  Error corrupt_item(std::size_t item) const;

 private:
  SwapFile(std::vector<std::uint64_t> item_bytes, std::vector<std::uint32_t> stripes);
  DirectFile& file(std::size_t item) const noexcept { return *files_[stripes_[item]]; }
  std::vector<std::unique_ptr<DirectFile>> files_;  // by stripe
  std::vector<std::uint64_t> item_bytes_;
  std::vector<std::uint32_t> stripes_;
  std::vector<std::uint64_t> offsets_;
  std::vector<std::uint64_t> hashes_;
};

}  // namespace ziggurat
