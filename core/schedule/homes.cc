// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes.cc: parameters on the three tiers and in lent memory. Gradients are in
// grad_home.cc.
#include "core/schedule/homes.h"

#include <algorithm>

#include "base/checksum.h"

namespace ziggurat {
namespace {

/// Returns the sizes of the items that hold parameters on NVMe: one for each chunk of `slices`
/// slices of every unit.
std::vector<std::uint64_t> param_items(const ChunkTable& table, int slices) {
  std::vector<std::uint64_t> sizes;
  for (UnitId u = 0; u < table.unit_count(); ++u) {
    for (int slice = 0; slice < slices; ++slice) {
      for (const Chunk& chunk : table.slice_chunks(u)) sizes.push_back(chunk.param_bytes());
    }
  }
  return sizes;
}

}  // namespace

std::unique_ptr<ParamHome> ParamHome::create(Context& context, std::vector<StripePlace> places,
                                             std::span<const TypedSpan<std::byte>> lent) {
  std::unique_ptr<ParamHome> home(new ParamHome(context));
  home->lent_.assign(lent.begin(), lent.end());
  home->reading_.resize(context.table.unit_count());
  for (UnitId u = 0; u < context.table.unit_count(); ++u) {
    const std::uint64_t size_bytes =
        context.table.home_count(u) * ziggurat::size_bytes(context.table.dtype());
    if (home->tier_ == Tier::kHost) {
      home->host_.push_back(context.permanent_lease(Purpose::kParams, size_bytes, "parameters",
                                                    context.node_of_unit(u)));
    } else if (home->tier_ == Tier::kDevice) {
      home->device_.push_back(context.device.allocate(size_bytes, Purpose::kParams));
    }
  }
  if (home->tier_ == Tier::kNvme) {
    const Sharding& sharding = context.table.sharding();
    const int slices = sharding.params_sharded() ? 1 : sharding.world_size;
    home->swap_ =
        SwapFile::create(context.reactor, std::move(places), param_items(context.table, slices));
  }
  return home;
}

bool ParamHome::gathered() const noexcept {
  const Sharding& sharding = context_.table.sharding();
  return sharding.optimizer_sharded() && !sharding.params_sharded();
}

std::vector<ParamHome::Item> ParamHome::items(UnitId unit) const {
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

std::size_t ParamHome::item_of(ChunkId id) const noexcept {
  if (!gathered()) return id;
  const ChunkTable& table = context_.table;
  const UnitChunks& unit = table.unit(table.chunk(id).unit);
  const auto ranks = static_cast<std::size_t>(table.sharding().world_size);
  const auto rank = static_cast<std::size_t>(table.sharding().rank);
  return unit.first_chunk * ranks + unit.chunk_count * rank + (id - unit.first_chunk);
}

bool ParamHome::used_at_home() const noexcept {
  if (tier_ == Tier::kTrainer) return true;
  return tier_ == Tier::kDevice && !context_.table.sharding().params_sharded();
}

std::uint64_t ParamHome::item_bytes(const Chunk& chunk) const noexcept {
  return tier_ == Tier::kNvme || out_of_reach() ? chunk.param_bytes() : 0;
}

TypedSpan<std::byte> ParamHome::in_unit(ChunkId id, std::byte* unit) const noexcept {
  const Chunk& chunk = context_.table.chunk(id);
  const DType dtype = context_.table.dtype();
  const std::uint64_t at = chunk.begin - context_.table.home_begin(chunk.unit);
  return {dtype, {unit + at * size_bytes(dtype), chunk.param_bytes()}};
}

TypedSpan<std::byte> ParamHome::destination(ChunkId id, std::span<std::byte> item) const noexcept {
  const Chunk& chunk = context_.table.chunk(id);
  if (tier_ == Tier::kTrainer)
    return lent_[chunk.unit].subspan(chunk.begin, context_.table.real_count(id));
  if (tier_ == Tier::kHost) return in_unit(id, host_[chunk.unit].bytes().data());
  if (tier_ == Tier::kDevice && !out_of_reach()) return in_unit(id, device_[chunk.unit].data());
  return {context_.table.dtype(), item.first(chunk.param_bytes())};
}

Task<> ParamHome::publish(ChunkId id, TypedSpan<const std::byte> values) {
  if (tier_ == Tier::kNvme) {
    co_await write_item(item_of(id), values.bytes);
  } else if (out_of_reach()) {
    const TypedDeviceSpan<std::byte> home = destination_on_device(id, {});
    co_await context_.copy_to_device(home.bytes, values.bytes);
  }
}

TypedDeviceSpan<std::byte> ParamHome::destination_on_device(
    ChunkId id, DeviceSpan<std::byte> staging) const noexcept {
  const Chunk& chunk = context_.table.chunk(id);
  if (tier_ != Tier::kDevice) return {context_.table.dtype(), staging.first(chunk.param_bytes())};
  const std::span<std::byte> home = in_unit(id, device_[chunk.unit].data()).bytes;
  return {context_.table.dtype(), {reinterpret_cast<std::uintptr_t>(home.data()), home.size()}};
}

Task<> ParamHome::publish_from_device(ChunkId id, TypedDeviceSpan<const std::byte> values,
                                      std::span<std::byte> item) {
  if (tier_ == Tier::kDevice) co_return;
  const UnitId unit = context_.table.chunk(id).unit;
  const std::span<std::byte> host =
      tier_ == Tier::kHost ? in_unit(id, host_[unit].bytes().data()).bytes : item;
  co_await context_.copy_to_host(host, values.bytes);
  if (tier_ == Tier::kNvme) co_await write_item(item_of(id), host);
}

Task<> ParamHome::write_item(std::size_t item, std::span<const std::byte> bytes) {
  std::uint64_t hash = 0;
  const std::function<void()> job = [&] { hash = hash64(bytes, item); };
  co_await context_.workers.run(context_.reactor, "hash params", job);
  co_await swap_->write(item, bytes, hash, IoPriority::kWriteBack);
}

Task<> ParamHome::publish_record(ChunkId id, std::uint64_t step, std::span<const std::byte> record,
                                 std::span<std::byte> item) {
  const TypedSpan<std::byte> param = destination(id, item);
  ParamRounding rounding = context_.rounding;
  rounding.step = context_.table.chunk(id).constant ? 0 : step;
  const std::function<void()> job = [&] {
    read_params(context_.table.state_format(id), record, rounding, context_.table.first_element(id),
                context_.table.decay_runs(id), param);
  };
  {
    const LentMemory::Use its(context_.lent);
    co_await context_.run_near(id, "round params", job);
  }
  co_await publish(id, param);
}

DeviceSpan<const std::byte> ParamHome::view(UnitId unit) const noexcept {
  if (tier_ == Tier::kDevice) return device_span(device_[unit]);
  const std::span<const std::byte> lent = lent_[unit].bytes;
  return {reinterpret_cast<std::uintptr_t>(lent.data()), lent.size()};
}

Task<ParamHome::Loading> ParamHome::load(UnitId unit, std::byte* destination, Need need,
                                         IoPriority priority) {
  const std::size_t element_bytes = size_bytes(context_.table.dtype());
  const std::uint64_t begin = context_.table.home_begin(unit);
  Stream::Copy request{.destination = destination + begin * element_bytes,
                       .source = nullptr,
                       .size_bytes = context_.table.home_count(unit) * element_bytes,
                       .direction = Stream::Direction::kToDevice};
  Loading loading;
  if (tier_ == Tier::kDevice) {
    request.source = device_[unit].data();
    request.direction = Stream::Direction::kOnDevice;
  } else {
    Fetched fetched = co_await fetch(unit, need, priority);
    request.source = fetched.bytes.data();
    loading.staging = std::move(fetched.lease);
  }
  loading.landed = context_.to_device.copy(request, [](const std::exception_ptr&) {});
  co_return loading;
}

Task<ParamHome::Fetched> ParamHome::fetch(UnitId unit, Need need, IoPriority priority) {
  Fetched fetched;
  if (tier_ == Tier::kHost) {
    fetched.bytes = host_[unit].bytes();
    co_return fetched;
  }
  const LeaseRequest lease{
      .purpose = Purpose::kParams,
      .size_bytes = context_.table.home_count(unit) * size_bytes(context_.table.dtype()),
      .need = need,
      .holder = "parameter read"};
  fetched.lease = co_await context_.pool.acquire(lease);
  const std::span<std::byte> memory = fetched.lease.bytes();
  fetched.bytes = memory;
  if (tier_ == Tier::kDevice) {
    co_await context_.copy_to_host(memory, device_span(device_[unit]));
    co_return fetched;
  }
  reading_[unit] = memory;
  const std::vector<Item> wanted = items(unit);
  co_await read_items(wanted, memory, context_.table.home_begin(unit), priority);
  reading_[unit] = {};
  co_return fetched;
}

void ParamHome::hurry(UnitId unit) {
  if (tier_ == Tier::kNvme) swap_->raise(reading_[unit], IoPriority::kDemand);
}

Task<> ParamHome::gather(UnitId unit, Need need) {
  if (tier_ == Tier::kNvme) {
    co_await gather_swapped(unit, need);
    co_return;
  }
  if (out_of_reach()) {
    co_await gather_staged(unit, need);
    co_return;
  }
  const std::span<std::byte> whole =
      tier_ == Tier::kHost
          ? host_[unit].bytes()
          : std::span<std::byte>(device_[unit].data(), context_.table.unit_param_bytes(unit));
  const std::size_t element_bytes = size_bytes(context_.table.dtype());
  co_await context_.ranks.params->all_gather(
      whole.subspan(context_.table.own_begin(unit) * element_bytes,
                    context_.table.unit(unit).slice_count * element_bytes),
      whole);
}

/// Gathers the unit in host memory, because ranks can exchange only there: its own slice is copied
/// from the device before, and the whole unit back to the device afterwards.
Task<> ParamHome::gather_staged(UnitId unit, Need need) {
  const ChunkTable& table = context_.table;
  const std::size_t element_bytes = size_bytes(table.dtype());
  const LeaseRequest wanted{.purpose = Purpose::kParams,
                            .size_bytes = table.unit_param_bytes(unit),
                            .need = need,
                            .holder = "parameter gather"};
  const Lease lease = co_await context_.pool.acquire(wanted);
  const std::uint64_t begin = table.own_begin(unit) * element_bytes;
  const std::span<std::byte> own =
      lease.bytes().subspan(begin, table.unit(unit).slice_count * element_bytes);
  const DeviceSpan<std::byte> home = device_span(device_[unit]);
  co_await context_.copy_to_host(own, home.subspan(begin, own.size()));
  co_await context_.ranks.params->all_gather(own, lease.bytes());
  co_await context_.copy_to_device(home, lease.bytes());
}

/// Reads this rank's slice from NVMe, gathers the unit, and writes the slices of the other ranks.
Task<> ParamHome::gather_swapped(UnitId unit, Need need) {
  const ChunkTable& table = context_.table;
  const std::size_t element_bytes = size_bytes(table.dtype());
  const LeaseRequest request{.purpose = Purpose::kParams,
                             .size_bytes = table.unit_param_bytes(unit),
                             .need = need,
                             .holder = "parameter gather"};
  const Lease memory = co_await context_.pool.acquire(request);
  const std::span<std::byte> whole = memory.bytes();
  const std::uint64_t own_begin = table.own_begin(unit);
  const std::uint64_t slice_count = table.unit(unit).slice_count;
  std::vector<Item> others = items(unit);
  const auto first_other = std::ranges::stable_partition(others, [&](const Item& item) {
    return item.begin >= own_begin && item.begin < own_begin + slice_count;
  });
  const std::vector<Item> mine(others.begin(), first_other.begin());
  others.erase(others.begin(), first_other.begin());
  co_await read_items(mine, whole, 0, IoPriority::kDemand);
  co_await context_.ranks.params->all_gather(
      whole.subspan(own_begin * element_bytes, slice_count * element_bytes), whole);
  WorkGroup writes(context_.reactor);
  for (const Item& item : others) {
    writes.spawn(write_item(item.index,
                            whole.subspan(item.begin * element_bytes, item.count * element_bytes)));
  }
  co_await writes.wait_idle();
}

/// Reads each item to its place in `memory`, which begins with element `begin` of the unit.
Task<> ParamHome::read_items(const std::vector<Item>& items, std::span<std::byte> memory,
                             std::uint64_t begin, IoPriority priority) {
  const std::size_t element_bytes = size_bytes(context_.table.dtype());
  WorkGroup reads(context_.reactor);
  for (const Item& item : items) {
    reads.spawn(
        read_item(item.index,
                  memory.subspan((item.begin - begin) * element_bytes, item.count * element_bytes),
                  priority));
  }
  co_await reads.wait_idle();
}

Task<> ParamHome::read_item(std::size_t item, std::span<std::byte> memory, IoPriority priority) {
  co_await swap_->read(item, memory, priority);
  std::uint64_t hash = 0;
  const std::function<void()> job = [&] { hash = hash64(memory, item); };
  co_await context_.workers.run(context_.reactor, "verify params", job);
  if (hash != swap_->expected_hash(item)) throw swap_->corrupt_item(item);
}

}  // namespace ziggurat
