// SPDX-License-Identifier: Apache-2.0
// core/stash/stash_file.cc: first fit from the files' begins, so that they stay as short as what is
// in them at once.
#include "core/stash/stash_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"

namespace ziggurat {
namespace {

/// No drive has more.
constexpr std::uint64_t kFileBytesMax = std::uint64_t{1} << 50;
/// By how much a file grows at once, where the drive has room for it.
constexpr std::uint64_t kGrowBytes = 64 * kMiB;

std::unique_ptr<DirectFile> opened(Reactor& reactor, const StripePlace& place) {
  OpenOptions options;
  options.unnamed = true;
  options.create = true;
  options.writable = true;
  auto file = DirectFile::open(reactor, place.io, place.directory, options, place.observers);
  const DirectAlignment needed = file->alignment();
  const std::uint64_t most = std::max(needed.memory_bytes, needed.offset_bytes);
  if (most > StashFile::kAlignmentBytes) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: direct transfers must be aligned to {}, and a stash aligns to {}: "
                    "give a directory on another drive",
                    place.directory, format_bytes(most), format_bytes(StashFile::kAlignmentBytes)));
  }
  return file;
}

}  // namespace

StashFile::StashFile(Reactor& reactor, std::vector<StripePlace> places) {
  for (const StripePlace& place : places) {
    ZIGGURAT_CHECK(place.weight > 0, "{} has no weight", place.directory);
    stripes_.push_back({.file = opened(reactor, place),
                        .weight = place.weight,
                        .arena = Arena(kFileBytesMax, kAlignmentBytes)});
  }
}

StashFile::Range StashFile::take(std::uint64_t size_bytes) {
  const auto fullness = [](const Stripe& stripe) {
    return static_cast<double>(stripe.used_bytes) / static_cast<double>(stripe.weight);
  };
  const auto found = std::ranges::min_element(stripes_, {}, fullness);
  Stripe& stripe = *found;
  const std::optional<std::uint64_t> offset = stripe.arena.allocate(size_bytes);
  ZIGGURAT_CHECK(offset.has_value(), "{}: no range of {} bytes", stripe.file->path(), size_bytes);
  const Range range{.stripe = static_cast<std::size_t>(found - stripes_.begin()),
                    .offset_bytes = *offset,
                    .size_bytes = size_bytes};
  try {
    reserve(stripe, *offset + size_bytes);
  } catch (...) {
    stripe.arena.free(*offset, size_bytes);
    throw;
  }
  stripe.used_bytes += size_bytes;
  return range;
}

/// Makes sure that the drive has room up to `end_bytes`: a write into room that is reserved does
/// not fail for want of it.
void StashFile::reserve(Stripe& stripe, std::uint64_t end_bytes) {
  if (end_bytes <= stripe.reserved_bytes) return;
  const std::uint64_t generous = round_up(end_bytes, kGrowBytes);
  try {
    stripe.file->allocate(generous);
    stripe.reserved_bytes = generous;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kResourceExhausted) throw;
    stripe.file->allocate(end_bytes);
    stripe.reserved_bytes = end_bytes;
  }
}

void StashFile::give_back(const Range& range) {
  Stripe& stripe = stripes_[range.stripe];
  stripe.arena.free(range.offset_bytes, range.size_bytes);
  stripe.used_bytes -= range.size_bytes;
}

Task<> StashFile::write(const Range& range, std::span<const std::byte> bytes, IoPriority priority) {
  return stripes_[range.stripe].file->write(range.offset_bytes, bytes, priority);
}

Task<> StashFile::read(const Range& range, std::span<std::byte> bytes, IoPriority priority) {
  return stripes_[range.stripe].file->read(range.offset_bytes, bytes, priority);
}

Error StashFile::corrupt(const Range& range) const {
  return {ErrorCode::kDataLoss,
          fmt::format("{}: {} of the stash at offset {} have a wrong checksum: the drive did not "
                      "return what was written. This step cannot be finished; the state is safe. "
                      "Check the drive (smartctl, dmesg) and make the step again",
                      stripes_[range.stripe].file->path(), format_bytes(range.size_bytes),
                      range.offset_bytes)};
}

}  // namespace ziggurat
