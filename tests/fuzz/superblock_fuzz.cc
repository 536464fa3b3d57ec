// SPDX-License-Identifier: Apache-2.0
// tests/fuzz/superblock_fuzz.cc: a store's file whose superblocks, text and tables have the
// checksums that they should have, and say anything.
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "base/bytes.h"
#include "base/checksum.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/support/memory_files.h"
#include "tiers/store/store_layout.h"
#include "tiers/store/store_survey.h"
#include "tiers/store/superblock.h"

namespace ziggurat::fuzz {
namespace {

/// As long as the file of a store with one record of one tile in two slots.
constexpr std::uint64_t kFileBytes = 12 * kRegionBytes;
constexpr std::uint64_t kTextOffset = 2 * kRegionBytes;
constexpr std::size_t kScratchBytes = kMiB;
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

std::uint64_t empty_table_hash(std::uint64_t generation) {
  static const std::vector<std::byte> table(kRegionBytes);
  static const std::uint64_t first = hash64(table, 0);
  return generation == 0 ? first : hash64(table, generation);
}

/// Which fields the first number takes from the input, one bit each; the rest is as it should be.
class Chosen {
 public:
  explicit Chosen(Numbers& numbers) : numbers_(numbers), bits_(numbers.next()) {}
  template <class T>
  void field(T& value, std::uint64_t right) {
    value = static_cast<T>(next() ? numbers_.next() : right);
  }
  bool next() {
    const bool is_set = (bits_ & 1) != 0;
    bits_ >>= 1;
    return is_set;
  }

 private:
  Numbers& numbers_;
  std::uint64_t bits_;
};

/// The newest superblock, and where the input asks for it the one of the generation before.
struct Superblocks {
  Superblock newest;
  std::optional<Superblock> before;
};

Superblocks superblocks_of(Numbers& numbers) {
  Chosen chosen(numbers);
  Superblocks made;
  Superblock& its = made.newest;
  its.uuid = {1, 2};
  chosen.field(its.chunk_count, 1);
  chosen.field(its.slots, 2);
  chosen.field(its.text_offset_bytes, kTextOffset);
  const bool text_bytes_chosen = chosen.next();
  if (text_bytes_chosen) its.text_bytes = numbers.next();
  chosen.field(its.generation, 0);
  chosen.field(its.table_offset_bytes, kTextOffset + kRegionBytes);
  chosen.field(its.table_hash, empty_table_hash(its.generation));
  chosen.field(its.blob_offset_bytes, kTextOffset + 3 * kRegionBytes);
  chosen.field(its.blob_bytes, 0);
  chosen.field(its.blob_hash, hash64({}, its.generation));
  chosen.field(its.file_bytes, kFileBytes);
  chosen.field(its.epoch, 1);
  chosen.field(its.in_progress, 0);
  const bool has_before = chosen.next() && its.generation > 0;
  const std::string_view text = numbers.rest();
  if (!text_bytes_chosen) its.text_bytes = text.size();
  its.text_hash = hash64(std::as_bytes(std::span(text.data(), text.size())), 0);
  if (!has_before) return made;
  Superblock before = its;
  before.in_progress = false;
  before.table_hash = empty_table_hash(--before.generation);
  its.previous_hash = superblock_hash(before);
  made.before = before;
  return made;
}

/// What every input needs and none changes.
struct World {
  Reactor reactor{Clock::Kind::kVirtual};
  test::MemoryFiles io{reactor};
  std::vector<std::byte>& file = io.files[kPath];
  SoloQuorum ranks;
  std::unique_ptr<std::byte, decltype(&std::free)> scratch{
      static_cast<std::byte*>(std::aligned_alloc(4096, kScratchBytes)), &std::free};
  std::vector<std::byte> block = std::vector<std::byte>(kSuperblockBytes);

  World() { file.resize(kFileBytes); }

  void write(std::uint64_t offset, std::span<const std::byte> bytes) {
    if (!bytes.empty()) std::memcpy(file.data() + offset, bytes.data(), bytes.size());
  }
  void erase(std::uint64_t offset, std::size_t size) { std::memset(file.data() + offset, 0, size); }
  void write(const Superblock& superblock) {
    encode_superblock(superblock, block);
    for (int copy = 0; copy < kSuperblockCopies; ++copy) write(offset(superblock, copy), block);
  }
  void erase(const Superblock& superblock) {
    for (int copy = 0; copy < kSuperblockCopies; ++copy)
      erase(offset(superblock, copy), kSuperblockBytes);
  }
  static std::uint64_t offset(const Superblock& superblock, int copy) {
    return StoreLayout::superblock_offset(parity_of(superblock.generation), copy, kFileBytes);
  }

  Task<> look() {
    const StoreEnvironment environment{.reactor = reactor,
                                       .io = io,
                                       .ranks = ranks,
                                       .observers = {},
                                       .staging = {},
                                       .scratch = {scratch.get(), kScratchBytes}};
    const auto survey = StoreSurvey::open_to_look(environment, kPath);
    co_await survey->read_superblocks();
    survey->check_shape();
    co_await survey->read_contents();
    const std::optional<std::uint64_t> newest = survey->newest_candidate(SlotEntry::kNone);
    if (!newest) co_return;
    const StoreSurvey::Generation& its = survey->generation(*newest);
    const StoreLayout& layout = survey->layout();
    require(its.table.size() == layout.record_bytes.size());
    for (ChunkId chunk = 0; chunk < its.table.size(); ++chunk) {
      const std::uint64_t begin = layout.record_offset(chunk, *newest);
      require(begin < kFileBytes && layout.record_bytes[chunk] <= kFileBytes - begin);
    }
    survey->before(*newest);
  }
};

}  // namespace
}  // namespace ziggurat::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ziggurat;
  using namespace ziggurat::fuzz;
  static World world;
  Numbers numbers(data, size);
  const Superblocks superblocks = superblocks_of(numbers);
  const std::string_view text = numbers.rest().substr(0, kRegionBytes);
  world.write(superblocks.newest);
  if (superblocks.before) world.write(*superblocks.before);
  world.write(kTextOffset, std::as_bytes(std::span(text.data(), text.size())));
  taken([&] { world.reactor.block_on(world.look()); });
  world.erase(superblocks.newest);
  if (superblocks.before) world.erase(*superblocks.before);
  world.erase(kTextOffset, text.size());
  return 0;
}
