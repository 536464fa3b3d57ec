// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes/checked_items.cc: hashes are seeded with the item's number, so that an item
// in another's place is found.
#include "core/schedule/homes/checked_items.h"

#include "base/checksum.h"

namespace ziggurat {

Task<> write_hashed(Context& context, SwapFile& file, std::size_t item,
                    std::span<const std::byte> bytes, IoPriority priority, int node) {
  std::uint64_t hash = 0;
  const std::function<void()> job = [&] { hash = hash64(bytes, item); };
  const Work work{.name = "hash item", .bytes = bytes.size(), .read = bytes};
  co_await context.workers.run(context.reactor, work, job, node);
  co_await file.write(item, bytes, hash, priority);
}

Task<> read_verified(Context& context, SwapFile& file, std::size_t item, std::span<std::byte> bytes,
                     IoPriority priority, int node) {
  co_await file.read(item, bytes, priority);
  std::uint64_t hash = file.expected_hash(item);  // what the job finds, unless it is damaged
  const std::function<void()> job = [&] { hash = hash64(bytes, item); };
  const Work work{.name = "verify item", .bytes = bytes.size(), .read = bytes};
  co_await context.workers.run(context.reactor, work, job, node);
  if (hash != file.expected_hash(item)) throw file.corrupt_item(item);
}

}  // namespace ziggurat
