// SPDX-License-Identifier: Apache-2.0
// core/stash/stash_file.h: space on NVMe for items of any size that come and go: an unnamed file
// for each drive, which grows as it is used. Reactor's thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "aio/direct_file.h"
#include "base/error.h"
#include "tiers/pool/arena.h"
#include "tiers/store/striping.h"

namespace ziggurat {

class StashFile {
 public:
  /// A range of one of the files.
  struct Range {
    std::size_t stripe = 0;
    std::uint64_t offset_bytes = 0;
    std::uint64_t size_bytes = 0;
  };

  /// Makes the files. Errors: errno's; kInvalidArgument if a drive's transfers need an alignment of
  /// more than kAlignmentBytes.
  StashFile(Reactor& reactor, std::vector<StripePlace> places);

  /// Every offset and size is a multiple of this.
  static constexpr std::uint64_t kAlignmentBytes = 4096;

  /// Takes a free range on the drive that has the fewest bytes for its weight. Errors: errno's, if
  /// the drive has no room for it.
  Range take(std::uint64_t size_bytes);
  void give_back(const Range& range);
  Task<> write(const Range& range, std::span<const std::byte> bytes, IoPriority priority);
  Task<> read(const Range& range, std::span<std::byte> bytes, IoPriority priority);
  /// Returns the error of bytes that are not those that were written.
  Error corrupt(const Range& range) const;

 private:
  struct Stripe {
    std::unique_ptr<DirectFile> file;
    std::uint64_t weight = 1;
    std::uint64_t used_bytes = 0;
    std::uint64_t reserved_bytes = 0;  // of the drive, from the file's begin
    Arena arena;
  };
  void reserve(Stripe& stripe, std::uint64_t end_bytes);
  std::vector<Stripe> stripes_;
};

}  // namespace ziggurat
