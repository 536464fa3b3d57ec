// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes.cc: the three tiers, for each class of state.
#include "core/schedule/homes.h"

#include <fmt/format.h>

#include "base/checksum.h"
#include "base/error.h"

namespace ziggurat {
namespace {

/// Room on NVMe for one value an element, an item a chunk.
Task<std::unique_ptr<SwapFile>> swap_per_chunk(Context& context, SwapEnvironment swap) {
  std::vector<std::uint64_t> sizes;
  for (const Chunk& chunk : context.table.chunks()) sizes.push_back(chunk.param_bytes());
  Task<std::unique_ptr<SwapFile>> creating =
      SwapFile::create(context.reactor, std::move(swap.places), std::move(sizes), swap.fill);
  co_return co_await std::move(creating);
}

}  // namespace

Task<std::unique_ptr<ParamHome>> ParamHome::create(Context& context, SwapEnvironment swap) {
  std::unique_ptr<ParamHome> home(new ParamHome(context));
  home->reading_.resize(context.table.unit_count());
  for (UnitId u = 0; u < context.table.unit_count(); ++u) {
    const std::uint64_t size_bytes = context.table.unit_param_bytes(u);
    if (home->tier_ == Tier::kHost) {
      home->host_.push_back(context.permanent_lease(Purpose::kParams, size_bytes, "parameters"));
    } else if (home->tier_ == Tier::kDevice) {
      home->device_.push_back(context.device.allocate(size_bytes, Purpose::kParams));
    }
  }
  if (home->tier_ == Tier::kNvme) {
    Task<std::unique_ptr<SwapFile>> making = swap_per_chunk(context, std::move(swap));
    home->swap_ = co_await std::move(making);
  }
  co_return home;
}

std::uint64_t ParamHome::item_bytes(const Chunk& chunk) const noexcept {
  return tier_ == Tier::kNvme ? chunk.param_bytes() : 0;
}

TypedSpan<std::byte> ParamHome::destination(ChunkId id, std::span<std::byte> item) const noexcept {
  const Chunk& chunk = context_.table.chunk(id);
  const DType dtype = context_.table.dtype();
  const auto in_unit = [&](std::byte* unit) -> TypedSpan<std::byte> {
    return {dtype, {unit + chunk.begin * size_bytes(dtype), chunk.param_bytes()}};
  };
  switch (tier_) {
    case Tier::kDevice: return in_unit(device_[chunk.unit].data());
    case Tier::kHost: return in_unit(host_[chunk.unit].bytes().data());
    case Tier::kNvme: break;
  }
  return {dtype, item.first(chunk.param_bytes())};
}

Task<> ParamHome::publish(ChunkId id, TypedSpan<const std::byte> values) {
  if (tier_ != Tier::kNvme) co_return;
  const std::span<const std::byte> bytes = values.bytes;
  std::uint64_t hash = 0;
  const std::function<void()> job = [&] { hash = hash64(bytes, id); };
  co_await context_.workers.run(context_.reactor, "hash params", job);
  co_await swap_->write(id, bytes, hash, IoPriority::kWriteBack);
}

Task<> ParamHome::publish_record(ChunkId id, std::uint64_t generation,
                                 std::span<const std::byte> record, std::span<std::byte> item) {
  const TypedSpan<std::byte> param = destination(id, item);
  ParamRounding rounding = context_.rounding;
  rounding.step = generation;
  const std::function<void()> job = [&] {
    read_params(context_.table.state().format, record, rounding, context_.table.first_element(id),
                param);
  };
  co_await context_.workers.run(context_.reactor, "round params", job);
  co_await publish(id, param);
}

std::span<const std::byte> ParamHome::device_view(UnitId unit) const noexcept {
  return {device_[unit].data(), device_[unit].size_bytes()};
}

Task<> ParamHome::load(UnitId unit, std::byte* destination, Need need, IoPriority priority) {
  const std::uint64_t size_bytes = context_.table.unit_param_bytes(unit);
  Lease staging;
  std::span<std::byte> source;
  if (tier_ == Tier::kHost) {
    source = host_[unit].bytes();
  } else {
    const LeaseRequest request{.purpose = Purpose::kParams,
                               .size_bytes = size_bytes,
                               .need = need,
                               .holder = "parameter read"};
    staging = co_await context_.pool.acquire(request);
    source = staging.bytes();
    reading_[unit] = source;
    co_await read_unit(unit, source, priority);
    reading_[unit] = {};
  }
  const Stream::Copy request{.destination = destination,
                             .source = source.data(),
                             .size_bytes = size_bytes,
                             .direction = Stream::Direction::kToDevice};
  co_await copy(context_.reactor, context_.to_device, request);
}

void ParamHome::hurry(UnitId unit) {
  if (tier_ == Tier::kNvme) swap_->raise(reading_[unit], IoPriority::kDemand);
}

Task<> ParamHome::read_unit(UnitId unit, std::span<std::byte> memory, IoPriority priority) {
  const UnitChunks& chunks = context_.table.unit(unit);
  WorkGroup reads(context_.reactor);
  for (ChunkId id = chunks.first_chunk; id < chunks.first_chunk + chunks.chunk_count; ++id) {
    const Chunk& chunk = context_.table.chunk(id);
    const std::uint64_t offset_bytes = chunk.begin * size_bytes(context_.table.dtype());
    reads.spawn(read_chunk(id, memory.subspan(offset_bytes, chunk.param_bytes()), priority));
  }
  co_await reads.wait_idle();
}

Task<> ParamHome::read_chunk(ChunkId id, std::span<std::byte> memory, IoPriority priority) {
  co_await swap_->read(id, memory, priority);
  std::uint64_t hash = 0;
  const std::function<void()> job = [&] { hash = hash64(memory, id); };
  co_await context_.workers.run(context_.reactor, "verify params", job);
  if (hash != swap_->expected_hash(id)) throw swap_->corrupt_item(id);
}

Task<std::unique_ptr<GradHome>> GradHome::create(Context& context, SwapEnvironment swap,
                                                 AllocateDevice allocate) {
  std::unique_ptr<GradHome> home(new GradHome(context, std::move(allocate)));
  home->host_.resize(context.table.chunks().size());
  home->device_.resize(context.table.chunks().size());
  if (home->tier_ == Tier::kNvme) {
    Task<std::unique_ptr<SwapFile>> making = swap_per_chunk(context, std::move(swap));
    home->swap_ = co_await std::move(making);
  }
  co_return home;
}

std::uint64_t GradHome::item_bytes(const Chunk& chunk) const noexcept {
  return tier_ == Tier::kNvme ? chunk.param_bytes() : 0;
}

Task<> GradHome::accept(ChunkId id, const std::byte* source, Need need) {
  const std::uint64_t size_bytes = context_.table.chunk(id).param_bytes();
  if (tier_ == Tier::kDevice) {
    device_[id] = co_await allocate_(size_bytes, Purpose::kGradients);
    const Stream::Copy request{.destination = device_[id].data(),
                               .source = source,
                               .size_bytes = size_bytes,
                               .direction = Stream::Direction::kOnDevice};
    co_await copy(context_.reactor, context_.to_host, request);
    co_return;
  }
  const LeaseRequest lease_request{
      .purpose = Purpose::kGradients, .size_bytes = size_bytes, .need = need, .holder = "gradient"};
  Lease lease = co_await context_.pool.acquire(lease_request);
  const Stream::Copy request{.destination = lease.bytes().data(),
                             .source = source,
                             .size_bytes = size_bytes,
                             .direction = Stream::Direction::kToHost};
  co_await copy(context_.reactor, context_.to_host, request);
  if (tier_ == Tier::kHost) {
    host_[id] = std::move(lease);
    co_return;
  }
  std::uint64_t hash = 0;
  const std::span<const std::byte> bytes = lease.bytes();
  const std::function<void()> job = [&] { hash = hash64(bytes, id); };
  co_await context_.workers.run(context_.reactor, "hash gradient", job);
  co_await swap_->write(id, bytes, hash, IoPriority::kWriteBack);
}

Task<TypedSpan<const std::byte>> GradHome::fetch(ChunkId id, std::span<std::byte> item) {
  TypedSpan<const std::byte> grad{context_.table.dtype(), item};
  if (tier_ == Tier::kDevice) grad.bytes = {device_[id].data(), device_[id].size_bytes()};
  if (tier_ == Tier::kHost) grad.bytes = host_[id].bytes();
  if (tier_ != Tier::kNvme) co_return grad;
  co_await swap_->read(id, item, IoPriority::kPrefetch);
  std::uint64_t hash = 0;
  const std::function<void()> job = [&] { hash = hash64(item, id); };
  co_await context_.workers.run(context_.reactor, "verify gradient", job);
  if (hash != swap_->expected_hash(id)) throw swap_->corrupt_item(id);
  co_return grad;
}

void GradHome::drop(ChunkId id) noexcept {
  host_[id] = {};
  device_[id] = {};
}

RecordHome::RecordHome(Context& context) : context_(context) {
  for (const Chunk& chunk : context.table.chunks()) {
    if (context.placement.optimizer == Tier::kHost) {
      host_.push_back(
          context.permanent_lease(Purpose::kOptimizer, chunk.record_bytes(), "optimizer state"));
    } else if (context.placement.optimizer == Tier::kDevice) {
      device_.push_back(context.device.allocate(chunk.record_bytes(), Purpose::kOptimizer));
    }
  }
}

std::span<std::byte> RecordHome::record(ChunkId chunk) const noexcept {
  if (context_.placement.optimizer == Tier::kHost) return host_[chunk].bytes();
  return {device_[chunk].data(), device_[chunk].size_bytes()};
}

}  // namespace ziggurat
