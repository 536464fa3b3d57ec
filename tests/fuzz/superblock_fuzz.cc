// SPDX-License-Identifier: Apache-2.0
// tests/fuzz/superblock_fuzz.cc: a store's file whose superblocks and text have the checksums that
// they should have, and say anything.
#include <algorithm>
#include <cstring>
#include <vector>

#include "aio/direct_file.h"
#include "aio/simulated_engine.h"
#include "base/bytes.h"
#include "base/checksum.h"
#include "tests/fuzz/fuzz_target.h"
#include "tiers/store_layout.h"
#include "tiers/store_reader.h"
#include "tiers/superblock.h"

namespace ziggurat::fuzz {
namespace {

constexpr std::uint64_t kFileBytes = 8 * kRegionBytes;
constexpr std::uint64_t kTextOffset = 2 * kRegionBytes;
const std::string kPath = "/drive/rank00000.ziggurat";

/// Numbers from the front of the input; zeros when it has ended.
class Numbers {
 public:
  Numbers(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}
  std::uint64_t next() {
    std::uint64_t value = 0;
    const std::size_t width = std::min(sizeof(value), size_);
    if (width > 0) std::memcpy(&value, data_, width);
    data_ += width;
    size_ -= width;
    return value;
  }
  std::string_view rest() const { return text_of(data_, size_); }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
};

/// What the first number says is taken from the input, the rest is as it should be.
Superblock superblock_of(Numbers& numbers) {
  const std::uint64_t chosen = numbers.next();
  Superblock its;
  its.uuid = {1, 2};
  std::uint64_t bit = 0;
  const auto field = [&](auto& value, std::uint64_t right) {
    const bool from_input = (chosen >> bit++ & 1) != 0;
    const std::uint64_t number = from_input ? numbers.next() : right;
    value = static_cast<std::remove_cvref_t<decltype(value)>>(number);
  };
  field(its.chunk_count, 1);
  field(its.slots, 2);
  field(its.text_offset_bytes, kTextOffset);
  field(its.text_bytes, 0);
  field(its.generation, 0);
  field(its.table_offset_bytes, kTextOffset + kRegionBytes);
  field(its.table_hash, 0);
  field(its.blob_offset_bytes, kTextOffset + 3 * kRegionBytes);
  field(its.blob_bytes, 0);
  field(its.blob_hash, 0);
  field(its.file_bytes, kFileBytes);
  field(its.epoch, 1);
  field(its.in_progress, 0);
  if ((chosen >> 3 & 1) == 0) its.text_bytes = numbers.rest().size();
  const std::string_view text = numbers.rest();
  its.text_hash = hash64(std::as_bytes(std::span(text.data(), text.size())), 0);
  return its;
}

Task<> make_file(Reactor& reactor, SimulatedDisk& disk) {
  SimulatedEngine io(reactor, disk);
  const auto file = DirectFile::open(reactor, io, kPath, {.create = true, .writable = true});
  file->allocate(kFileBytes);
  co_await file->sync();
  io.sync_directory("/drive");
}

Task<> look(Reactor& reactor, SimulatedDisk& disk) {
  SimulatedEngine io(reactor, disk);
  std::vector<StripePlace> places;
  places.push_back({.io = io, .observers = {}, .directory = "/drive"});
  Task<std::unique_ptr<StoreReader>> opening = StoreReader::open(reactor, std::move(places));
  const std::unique_ptr<StoreReader> reader = co_await std::move(opening);
}

void write(SimulatedDisk& disk, std::uint64_t offset, std::span<const std::byte> bytes) {
  disk.overwrite(kPath, offset, bytes);
}

}  // namespace
}  // namespace ziggurat::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ziggurat;
  using namespace ziggurat::fuzz;
  Numbers numbers(data, size);
  const Superblock superblock = superblock_of(numbers);
  const std::string_view text = numbers.rest();
  Reactor reactor(Clock::Kind::kVirtual);
  SimulatedDisk disk;
  reactor.block_on(make_file(reactor, disk));
  std::vector<std::byte> block(kRegionBytes);
  encode_superblock(superblock, block);
  for (int copy = 0; copy < kSuperblockCopies; ++copy) {
    write(disk, StoreLayout::superblock_offset(parity_of(superblock.generation), copy, kFileBytes),
          block);
  }
  write(disk, kTextOffset,
        std::as_bytes(std::span(text.data(), std::min<std::size_t>(text.size(), kRegionBytes))));
  taken([&] { reactor.block_on(look(reactor, disk)); });
  return 0;
}
