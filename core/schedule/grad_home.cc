// SPDX-License-Identifier: Apache-2.0
// core/schedule/grad_home.cc: gradients on the three tiers and in lent memory.
#include <utility>

#include "base/checksum.h"
#include "core/schedule/homes.h"

namespace ziggurat {

GradHome::GradHome(Context& context, AllocateDevice allocate)
    : context_(context), tier_(context.placement.grads), allocate_(std::move(allocate)) {
  for (std::size_t i = 0; i < context.table.chunks().size(); ++i)
    arrived_.emplace_back(context.cancel);
}

std::unique_ptr<GradHome> GradHome::create(Context& context, std::vector<StripePlace> places,
                                           AllocateDevice allocate) {
  std::unique_ptr<GradHome> home(new GradHome(context, std::move(allocate)));
  home->host_.resize(context.table.chunks().size());
  home->device_.resize(context.table.chunks().size());
  home->lent_.resize(context.table.unit_count());
  if (home->tier_ == Tier::kNvme) {
    std::vector<std::uint64_t> sizes;
    for (const Chunk& chunk : context.table.chunks())
      sizes.push_back(chunk.constant ? 0 : chunk.param_bytes());
    home->swap_ = SwapFile::create(context.reactor, std::move(places), std::move(sizes));
  }
  return home;
}

std::uint64_t GradHome::item_bytes(const Chunk& chunk) const noexcept {
  const bool elsewhere = tier_ == Tier::kNvme || out_of_reach();
  return elsewhere && !chunk.constant ? chunk.param_bytes() : 0;
}

Task<> GradHome::accept(ChunkId id, DeviceSpan<const std::byte> gradient, Need need) {
  const std::uint64_t size_bytes = gradient.size();
  if (tier_ == Tier::kDevice) {
    device_[id] = co_await allocate_(size_bytes, Purpose::kGradients);
    const Stream::Copy request{.destination = device_[id].data(),
                               .source = reinterpret_cast<const std::byte*>(gradient.address()),
                               .size_bytes = size_bytes,
                               .direction = Stream::Direction::kOnDevice};
    co_await copy(context_.reactor, context_.to_host, request);
    co_return;
  }
  const LeaseRequest lease_request{.purpose = Purpose::kGradients,
                                   .size_bytes = size_bytes,
                                   .need = need,
                                   .holder = "gradient",
                                   .numa_node = context_.node_of(id)};
  Lease lease = co_await context_.pool.acquire(lease_request);
  co_await context_.copy_to_host(lease.bytes(), gradient);
  if (tier_ == Tier::kHost) {
    host_[id] = std::move(lease);
    co_return;
  }
  std::uint64_t hash = 0;
  const std::span<const std::byte> bytes = lease.bytes();
  const std::function<void()> job = [&] { hash = hash64(bytes, id); };
  co_await context_.run_near(id, "hash gradient", job);
  co_await swap_->write(id, bytes, hash, IoPriority::kWriteBack);
}

Task<TypedSpan<const std::byte>> GradHome::fetch(ChunkId id, std::span<std::byte> item) {
  if (tier_ == Tier::kTrainer) {
    const Chunk& chunk = context_.table.chunk(id);
    co_return lent_[chunk.unit].subspan(chunk.begin, context_.table.real_count(id));
  }
  TypedSpan<const std::byte> grad{context_.table.dtype(), item};
  if (tier_ == Tier::kDevice && !out_of_reach())
    grad.bytes = {device_[id].data(), device_[id].size_bytes()};
  if (tier_ == Tier::kHost) grad.bytes = host_[id].bytes();
  if (out_of_reach()) co_await context_.copy_to_host(item, device_span(device_[id]));
  if (tier_ != Tier::kNvme) co_return grad;
  co_await swap_->read(id, item, IoPriority::kPrefetch);
  std::uint64_t hash = 0;
  const std::function<void()> job = [&] { hash = hash64(item, id); };
  co_await context_.run_near(id, "verify gradient", job);
  if (hash != swap_->expected_hash(id)) throw swap_->corrupt_item(id);
  co_return grad;
}

Task<TypedDeviceSpan<const std::byte>> GradHome::fetch_to_device(ChunkId id,
                                                                 std::span<std::byte> item,
                                                                 DeviceSpan<std::byte> staging) {
  const DType dtype = context_.table.dtype();
  if (tier_ == Tier::kDevice)
    co_return TypedDeviceSpan<const std::byte>{dtype, device_span(device_[id])};
  Task<TypedSpan<const std::byte>> fetching = fetch(id, item);
  const TypedSpan<const std::byte> host = co_await std::move(fetching);
  const DeviceSpan<std::byte> there = staging.first(host.bytes.size());
  co_await context_.copy_to_device(there, host.bytes);
  co_return TypedDeviceSpan<const std::byte>{dtype, there};
}

bool GradHome::absent(ChunkId id) const noexcept {
  return tier_ == Tier::kTrainer && lent_[context_.table.chunk(id).unit].bytes.empty();
}

void GradHome::drop(ChunkId id) noexcept {
  host_[id] = {};
  device_[id] = {};
}

}  // namespace ziggurat
