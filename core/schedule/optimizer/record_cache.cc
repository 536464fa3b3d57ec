// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer/record_cache.cc: the leases that are kept.
#include "core/schedule/optimizer/record_cache.h"

namespace ziggurat {

RecordCache::RecordCache(Context& context, std::span<const std::uint64_t> item_bytes) {
  items_.reserve(item_bytes.size());
  for (const std::uint64_t size_bytes : item_bytes) {
    const auto chunk = static_cast<ChunkId>(items_.size());
    items_.emplace_back();
    if (size_bytes == 0) continue;
    items_.back().lease = context.permanent_lease(Purpose::kKeptRecords, size_bytes, "kept record",
                                                  context.node_of(chunk));
  }
}

}  // namespace ziggurat
