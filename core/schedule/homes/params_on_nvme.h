// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes/params_on_nvme.h: parameters in a file on NVMe, an item for each chunk; in
// stages 1 and 2 for each chunk of every rank. For make_param_home.cc.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/schedule/homes/checked_items.h"
#include "core/schedule/homes/param_home.h"

namespace ziggurat {

class NvmeParamHome final : public UnitParamHome {
 public:
  NvmeParamHome(Context& context, std::vector<StripePlace> places)
      : UnitParamHome(context), reading_(context.table.unit_count()) {
    const Sharding& sharding = context.table.sharding();
    const int slices = sharding.params_sharded() ? 1 : sharding.world_size;
    file_ = SwapFile::create(context.reactor, std::move(places), item_sizes(context.table, slices));
  }

  std::uint64_t item_bytes(const Chunk& chunk) const noexcept override {
    return chunk.param_bytes();
  }
  TypedSpan<std::byte> destination(ChunkId id, std::span<std::byte> item) const noexcept override {
    return {context_.table.chunk_dtype(id), item.first(context_.table.chunk(id).param_bytes())};
  }
  Task<> bring(ChunkId id, std::span<std::byte> item, std::span<const ParamRun>) override {
    const std::span<std::byte> bytes = destination(id, item).bytes;
    co_await read_item(item_of(id), bytes, IoPriority::kDemand);
  }
  Task<> publish(ChunkId id, TypedSpan<const std::byte> values,
                 std::span<const ParamRun>) override {
    co_await write_item(item_of(id), values.bytes);
  }
  bool in_memory(UnitId) const noexcept override { return false; }

  Task<Fetched> fetch(UnitId unit, Need need, IoPriority priority) override {
    Fetched fetched;
    fetched.lease = co_await lease(home_bytes(unit), need, "parameter read");
    const std::span<std::byte> memory = fetched.lease.bytes();
    fetched.bytes = memory;
    reading_[unit] = memory;
    const std::vector<Item> wanted = items(unit);
    co_await read_items(unit, wanted, memory, context_.table.home_begin(unit), priority);
    reading_[unit] = {};
    co_return fetched;
  }
  void hurry(UnitId unit) override { file_->raise(reading_[unit], IoPriority::kDemand); }

  /// Reads this rank's slice from NVMe, gathers the unit, and writes the slices of the other ranks.
  Task<> gather(UnitId unit, Need need) override {
    const ChunkTable& table = context_.table;
    const Lease memory = co_await lease(table.unit_param_bytes(unit), need, "parameter gather");
    const std::span<std::byte> whole = memory.bytes();
    const std::uint64_t own_begin = table.own_begin(unit);
    const std::uint64_t slice_count = table.unit(unit).slice_count;
    std::vector<Item> others = items(unit);
    const auto first_other = std::ranges::stable_partition(others, [&](const Item& item) {
      return item.begin >= own_begin && item.begin < own_begin + slice_count;
    });
    const std::vector<Item> mine(others.begin(), first_other.begin());
    others.erase(others.begin(), first_other.begin());
    co_await read_items(unit, mine, whole, 0, IoPriority::kDemand);
    co_await gather_in(unit, whole);
    co_await write_items(unit, others, whole);
  }

  Task<> store(UnitId unit, std::span<const Written> written) override {
    const Need need{.generation = 0, .position = 0};  // the trainer waits
    const Lease lease = co_await this->lease(home_bytes(unit), need, "parameter write");
    const std::span<std::byte> memory = lease.bytes().first(home_bytes(unit));
    std::ranges::fill(memory, std::byte{0});
    co_await copy_written(written, memory);
    const std::vector<Item> all = items(unit);
    co_await write_items(unit, all, memory);
  }

 private:
  struct Item {
    std::size_t index;    // number of the item in file_
    std::uint64_t begin;  // the item's first element in its unit
    std::uint64_t count;
  };

  /// Returns the sizes of the file's items: one for each chunk of `slices` slices of every unit; 0
  /// for a unit that has no home.
  static std::vector<std::uint64_t> item_sizes(const ChunkTable& table, int slices) {
    std::vector<std::uint64_t> sizes;
    for (UnitId u = 0; u < table.unit_count(); ++u) {
      for (int slice = 0; slice < slices; ++slice) {
        for (const Chunk& chunk : table.slice_chunks(u))
          sizes.push_back(table.has_home(u) ? chunk.param_bytes() : 0);
      }
    }
    return sizes;
  }

  /// Whether the home has the slices of all ranks.
  bool gathered() const noexcept {
    const Sharding& sharding = context_.table.sharding();
    return sharding.optimizer_sharded() && !sharding.params_sharded();
  }

  std::vector<Item> items(UnitId unit) const {
    const ChunkTable& table = context_.table;
    const std::span<const Chunk> cut = table.slice_chunks(unit);
    const std::uint64_t slice_count = table.unit(unit).slice_count;
    const std::uint64_t slices = table.home_count(unit) / slice_count;
    std::size_t index = table.unit(unit).first_chunk;
    if (gathered()) index *= slices;
    std::vector<Item> items;
    for (std::uint64_t slice = 0; slice < slices; ++slice) {
      const std::uint64_t begin = table.home_begin(unit) + slice * slice_count;
      for (const Chunk& chunk : cut) {
        items.push_back(
            {.index = index++, .begin = begin + chunk.begin - cut[0].begin, .count = chunk.count});
      }
    }
    return items;
  }

  std::size_t item_of(ChunkId id) const noexcept {
    if (!gathered()) return id;
    const ChunkTable& table = context_.table;
    const UnitChunks& unit = table.unit(table.chunk(id).unit);
    const auto ranks = static_cast<std::size_t>(table.sharding().world_size);
    const auto rank = static_cast<std::size_t>(table.sharding().rank);
    return unit.first_chunk * ranks + unit.chunk_count * rank + (id - unit.first_chunk);
  }

  /// Parameters begin with zeros, which are not written.
  Task<> read_item(std::size_t item, std::span<std::byte> memory, IoPriority priority) {
    if (file_->is_written(item)) {
      co_await read_verified(context_, *file_, item, memory, priority);
    } else {
      std::ranges::fill(memory, std::byte{0});
    }
  }
  Task<> write_item(std::size_t item, std::span<const std::byte> bytes) {
    return write_hashed(context_, *file_, item, bytes, IoPriority::kWriteBack);
  }

  /// Reads each item to its place in `memory`, which begins with element `begin` of the unit.
  Task<> read_items(UnitId unit, const std::vector<Item>& items, std::span<std::byte> memory,
                    std::uint64_t begin, IoPriority priority) {
    const std::size_t element_bytes = context_.table.element_bytes(unit);
    WorkGroup reads(context_.reactor);
    for (const Item& item : items) {
      const std::span<std::byte> its =
          memory.subspan((item.begin - begin) * element_bytes, item.count * element_bytes);
      reads.spawn(read_item(item.index, its, priority));
    }
    co_await reads.wait_idle();
  }
  /// Writes each item from its place in `memory`, which is the unit's.
  Task<> write_items(UnitId unit, const std::vector<Item>& items,
                     std::span<const std::byte> memory) {
    const std::size_t element_bytes = context_.table.element_bytes(unit);
    WorkGroup writes(context_.reactor);
    for (const Item& item : items) {
      const std::span<const std::byte> its =
          memory.subspan(item.begin * element_bytes, item.count * element_bytes);
      writes.spawn(write_item(item.index, its));
    }
    co_await writes.wait_idle();
  }

  std::unique_ptr<SwapFile> file_;
  // Per unit: memory into which a read is under way.
  std::vector<std::span<const std::byte>> reading_;
};

}  // namespace ziggurat
