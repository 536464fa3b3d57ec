// SPDX-License-Identifier: Apache-2.0
// tiers/swap_file.cc: items at fixed offsets in a file without a name, so that nothing is left
// behind however the process ends.
#include "tiers/swap_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/bytes.h"
#include "base/check.h"
#include "base/checksum.h"
#include "base/error.h"

namespace ziggurat {
namespace {
constexpr std::uint64_t kItemAlignment =
    64 * kKiB;  // a multiple of every direct-I/O alignment we accept
}

SwapFile::SwapFile(std::unique_ptr<DirectFile> file, std::vector<std::uint64_t> item_bytes)
    : file_(std::move(file)), item_bytes_(std::move(item_bytes)), hashes_(item_bytes_.size()) {}

Task<std::unique_ptr<SwapFile>> SwapFile::create(Reactor& reactor, IoEngine& io,
                                                 std::string directory,
                                                 std::vector<std::uint64_t> item_bytes,
                                                 std::span<std::byte> fill, IoObservers observers) {
  ZIGGURAT_CHECK(!fill.empty() && fill.size() % kMiB == 0, "fill memory of {} bytes", fill.size());
  OpenOptions options;
  options.unnamed = true;
  options.create = true;
  options.writable = true;
  auto file = DirectFile::open(reactor, io, directory, options, observers);
  std::unique_ptr<SwapFile> swap(new SwapFile(std::move(file), std::move(item_bytes)));
  std::uint64_t total_bytes = 0;
  for (const std::uint64_t size_bytes : swap->item_bytes_) {
    swap->offsets_.push_back(total_bytes);
    total_bytes += round_up(size_bytes, kItemAlignment);
  }
  if (total_bytes == 0) co_return swap;

  swap->file_->allocate(total_bytes);
  std::uint64_t value = 0;
  for (std::size_t i = 0; i + 8 <= fill.size(); i += 8) {
    value = value * 0x5851'f42d'4c95'7f2d +
            0x1405'7b7e'f767'814f;  // Knuth's LCG: the upper bytes do not compress
    const std::uint64_t mixed = value ^ (value >> 29);
    std::memcpy(fill.data() + i, &mixed, 8);
  }
  for (std::uint64_t offset = 0; offset < total_bytes;) {
    const auto piece = fill.first(std::min<std::uint64_t>(fill.size(), total_bytes - offset));
    co_await swap->file_->write(offset, piece);
    offset += piece.size();
  }
  co_return swap;
}

Task<> SwapFile::write(std::size_t item, std::span<const std::byte> bytes, std::uint64_t hash) {
  ZIGGURAT_CHECK(
      item < item_bytes_.size() && bytes.size() <= round_up(item_bytes_[item], kItemAlignment),
      "item {}: {} bytes", item, bytes.size());
  hashes_[item] = hash;
  co_await file_->write(offsets_[item], bytes);
}

Task<> SwapFile::read(std::size_t item, std::span<std::byte> bytes) {
  ZIGGURAT_CHECK(
      item < item_bytes_.size() && bytes.size() <= round_up(item_bytes_[item], kItemAlignment),
      "item {}: {} bytes", item, bytes.size());
  co_await file_->read(offsets_[item], bytes);
}

std::uint64_t SwapFile::expected_hash(std::size_t item) const {
  ZIGGURAT_CHECK(item < hashes_.size(), "item {} of {}", item, hashes_.size());
  return hashes_[item];
}

Error SwapFile::corrupt_item(std::size_t item) const {
  return {ErrorCode::kDataLoss,
          fmt::format("{}: item {} of the swap file ({} at offset {}) has a wrong checksum: the "
                      "drive did not return what was written. "
                      "Still safe: the state store, up to its durable generation; check the drive "
                      "(smartctl, dmesg) and resume from it",
                      file_->path(), item, format_bytes(item_bytes_[item]), offsets_[item])};
}

}  // namespace ziggurat
