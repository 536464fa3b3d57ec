// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer/record_home.cc: takes the memory of records for the whole run, chunk by
// chunk.
#include "core/schedule/optimizer/record_home.h"

#include <algorithm>

namespace ziggurat {

RecordHome::RecordHome(Context& context, const RecordPlan& plan)
    : context_(context), through_store_(context.placement.optimizer == Tier::kNvme) {
  const std::span<const Chunk> chunks = context.table.chunks();
  stays_.resize(chunks.size());
  host_.resize(chunks.size());
  device_.resize(chunks.size());
  generations_.resize(chunks.size(), kNone);
  for (ChunkId id = 0; id < chunks.size(); ++id) {
    if (chunks[id].constant) continue;
    const bool kept = id < plan.kept_item_bytes.size() && plan.kept_item_bytes[id] > 0;
    const int node = context.node_of(id);
    if (id < plan.device_chunks) {
      device_[id] = context.device->allocate(chunks[id].record_bytes(), Purpose::kOptimizer);
    } else if (kept) {
      host_[id] = context.permanent_lease(Purpose::kKeptRecords, plan.kept_item_bytes[id],
                                          "kept record", node);
    } else if (!through_store_) {
      host_[id] = context.permanent_lease(Purpose::kOptimizer, chunks[id].record_bytes(),
                                          "optimizer state", node);
    }
    stays_[id] = static_cast<bool>(device_[id]) || static_cast<bool>(host_[id]);
  }
}

bool RecordHome::updated_on_device(ChunkId id) const noexcept {
  return static_cast<bool>(device_[id]) && !context_.device->host_accessible();
}

bool RecordHome::has_own_item(ChunkId id) const noexcept {
  return through_store_ && static_cast<bool>(host_[id]);
}

std::uint64_t RecordHome::item_bytes(ChunkId id) const noexcept {
  return stays(id) && !updated_on_device(id) ? 0 : context_.table.chunk(id).record_bytes();
}

std::span<std::byte> RecordHome::memory(ChunkId id) const noexcept {
  if (device_[id]) return {device_[id].data(), device_[id].size_bytes()};
  return host_[id].bytes();
}

DeviceSpan<std::byte> RecordHome::on_device(ChunkId id) const noexcept {
  return device_span(device_[id]);
}

Task<> RecordHome::fetch(ChunkId id, std::span<std::byte> record) const {
  co_await context_.copy_to_host(record, device_span(device_[id]));
}

Task<> RecordHome::bring_home(ChunkId id, std::span<const std::byte> record) const {
  co_await context_.copy_to_device(device_span(device_[id]), record);
}

std::size_t RecordHome::device_count() const noexcept {
  return static_cast<std::size_t>(
      std::ranges::count_if(device_, [](const DeviceBuffer& b) { return static_cast<bool>(b); }));
}

std::size_t RecordHome::host_count() const noexcept {
  return static_cast<std::size_t>(
      std::ranges::count_if(host_, [](const Lease& lease) { return static_cast<bool>(lease); }));
}

}  // namespace ziggurat
