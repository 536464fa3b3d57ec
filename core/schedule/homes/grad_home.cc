// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes/grad_home.cc: what homes of gradients share.
#include "core/schedule/homes/grad_home.h"

#include <utility>

namespace ziggurat {

GradHome::GradHome(Context& context) : context_(context) {
  for (std::size_t i = 0; i < context.table.chunks().size(); ++i)
    arrived_.emplace_back(context.cancel);
}

Task<TypedDeviceSpan<const std::byte>> GradHome::fetch_to_device(ChunkId id,
                                                                 std::span<std::byte> item,
                                                                 DeviceSpan<std::byte> staging) {
  Task<TypedSpan<const std::byte>> fetching = fetch(id, item);
  const TypedSpan<const std::byte> host = co_await std::move(fetching);
  const DeviceSpan<std::byte> there = staging.first(host.bytes.size());
  co_await context_.copy_to_device(there, host.bytes);
  co_return TypedDeviceSpan<const std::byte>{context_.table.chunk_dtype(id), there};
}

Task<Lease> UnitGradHome::copied(ChunkId id, DeviceSpan<const std::byte> source, Need need) {
  const LeaseRequest request{.purpose = Purpose::kGradients,
                             .size_bytes = source.size(),
                             .need = need,
                             .holder = "gradient",
                             .numa_node = context_.node_of(id)};
  Lease lease = co_await context_.pool.acquire(request);
  co_await context_.copy_to_host(lease.bytes(), source);
  co_return lease;
}

}  // namespace ziggurat
