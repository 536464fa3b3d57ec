// SPDX-License-Identifier: Apache-2.0
// tiers/store/slot_table.cc: converts a generation's checksum table to bytes, and makes the seed of
// a record's hash.
#include <algorithm>

#include "base/checksum.h"
#include "tiers/store/state_store_impl.h"

namespace ziggurat {

std::uint64_t record_seed(const StoreUuid& uuid, ChunkId chunk, std::uint64_t generation,
                          std::uint64_t attempt) noexcept {
  return mix_seed(mix_seed(mix_seed(uuid.key(), chunk), generation), attempt);
}

void encode_table(const SlotTable& table, std::span<std::byte> region) {
  std::ranges::fill(region, std::byte{0});
  std::size_t offset = 0;
  for (const SlotEntry& entry : table) {
    for (const std::uint64_t value : {entry.hash, entry.attempt}) {
      for (int i = 0; i < 8; ++i) region[offset++] = static_cast<std::byte>(value >> (8 * i));
    }
  }
}

SlotTable decode_table(std::span<const std::byte> region, std::size_t chunk_count,
                       std::uint64_t generation) {
  std::size_t offset = 0;
  const auto load = [&] {
    std::uint64_t value = 0;
    for (int i = 0; i < 8; ++i)
      value |= std::to_integer<std::uint64_t>(region[offset++]) << (8 * i);
    return value;
  };
  SlotTable table(chunk_count);
  for (SlotEntry& entry : table) {
    entry.hash = load();
    entry.attempt = load();
    entry.generation = generation;
    entry.complete = true;
  }
  return table;
}

}  // namespace ziggurat
