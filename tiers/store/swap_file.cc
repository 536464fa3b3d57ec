// SPDX-License-Identifier: Apache-2.0
// tiers/store/swap_file.cc: items at fixed offsets in a file without a name, so that no file is
// left, however the process ends.
#include "tiers/store/swap_file.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/bytes.h"
#include "base/check.h"
#include "base/error.h"
#include "tiers/store/swap_items.h"

namespace ziggurat {
SwapFile::SwapFile(std::vector<std::uint64_t> item_bytes, std::vector<std::uint32_t> stripes)
    : item_bytes_(std::move(item_bytes)),
      stripes_(std::move(stripes)),
      hashes_(item_bytes_.size()),
      written_(item_bytes_.size()) {}

std::unique_ptr<SwapFile> SwapFile::create(Reactor& reactor, std::vector<StripePlace> places,
                                           std::vector<std::uint64_t> item_bytes) {
  auto stripes = assign_stripes(item_bytes, places);
  std::unique_ptr<SwapFile> swap(new SwapFile(std::move(item_bytes), std::move(stripes)));
  std::vector<std::uint64_t> sizes(places.size());
  for (std::size_t item = 0; item < swap->item_bytes_.size(); ++item) {
    std::uint64_t& size_bytes = sizes[swap->stripes_[item]];
    swap->offsets_.push_back(size_bytes);
    size_bytes += swap_item_bytes(swap->item_bytes_[item]);
  }
  for (std::size_t i = 0; i < places.size(); ++i) {
    OpenOptions options;
    options.unnamed = true;
    options.create = true;
    options.writable = true;
    swap->files_.push_back(
        DirectFile::open(reactor, places[i].io, places[i].directory, options, places[i].observers));
    if (sizes[i] > 0) swap->files_.back()->allocate(sizes[i]);
  }
  return swap;
}

Task<> SwapFile::write(std::size_t item, std::span<const std::byte> bytes, std::uint64_t hash,
                       IoPriority priority) {
  ZIGGURAT_CHECK(item < item_bytes_.size() && bytes.size() <= swap_item_bytes(item_bytes_[item]),
                 "item {}: {} bytes", item, bytes.size());
  hashes_[item] = hash;
  written_[item] = true;
  co_await file(item).write(offsets_[item], bytes, priority);
}

Task<> SwapFile::read(std::size_t item, std::span<std::byte> bytes, IoPriority priority) {
  ZIGGURAT_CHECK(item < item_bytes_.size() && bytes.size() <= swap_item_bytes(item_bytes_[item]),
                 "item {}: {} bytes", item, bytes.size());
  co_await file(item).read(offsets_[item], bytes, priority);
}

void SwapFile::raise(std::span<const std::byte> memory, IoPriority priority) {
  for (const auto& file : files_) file->raise(memory, priority);
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
                      file(item).path(), item, format_bytes(item_bytes_[item]), offsets_[item])};
}

}  // namespace ziggurat
