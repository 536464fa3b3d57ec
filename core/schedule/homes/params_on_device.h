// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes/params_on_device.h: parameters in the device's memory. Where the CPU cannot
// reach it, the CPU's update writes them in memory of its work item. For make_param_home.cc.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/schedule/homes/param_home.h"

namespace ziggurat {

class DeviceParamHome final : public UnitParamHome {
 public:
  explicit DeviceParamHome(Context& context)
      : UnitParamHome(context),
        reachable_(context.device->host_accessible()),
        zeros_(context.device->holds_zeros()) {
    units_.resize(context.table.unit_count());
    for (UnitId u = 0; u < units_.size(); ++u) {
      if (context.table.has_home(u))
        units_[u] = context.device->allocate(home_bytes(u), Purpose::kParams);
    }
  }

  std::uint64_t item_bytes(const Chunk& chunk) const noexcept override {
    return reachable_ ? 0 : chunk.param_bytes();
  }
  TypedSpan<std::byte> destination(ChunkId id, std::span<std::byte> item) const noexcept override {
    const Chunk& chunk = context_.table.chunk(id);
    if (reachable_) return in_unit(id, units_[chunk.unit].data());
    return {context_.table.chunk_dtype(id), item.first(chunk.param_bytes())};
  }
  Task<> bring(ChunkId id, std::span<std::byte> item, std::span<const ParamRun>) override {
    if (reachable_) co_return;
    co_await context_.copy_to_host(destination(id, item).bytes,
                                   destination_on_device(id, {}).bytes);
  }
  Task<> publish(ChunkId id, TypedSpan<const std::byte> values,
                 std::span<const ParamRun>) override {
    if (!reachable_)
      co_await context_.copy_to_device(destination_on_device(id, {}).bytes, values.bytes);
  }
  TypedDeviceSpan<std::byte> destination_on_device(ChunkId id,
                                                   DeviceSpan<std::byte>) const noexcept override {
    const std::span<std::byte> home =
        in_unit(id, units_[context_.table.chunk(id).unit].data()).bytes;
    return {context_.table.chunk_dtype(id),
            {reinterpret_cast<std::uintptr_t>(home.data()), home.size()}};
  }
  Task<> publish_from_device(ChunkId, TypedDeviceSpan<const std::byte>,
                             std::span<std::byte>) override {
    co_return;
  }
  bool in_memory(UnitId) const noexcept override { return reachable_; }
  bool begins_with_zeros() const noexcept override { return zeros_; }

  bool used_at_home() const noexcept override {
    return !context_.table.sharding().params_sharded();
  }
  DeviceSpan<const std::byte> view(UnitId unit) const noexcept override {
    return device_span(units_[unit]);
  }
  void used_until(UnitId unit, const Event& read) override { units_[unit].used_until(read); }
  Task<Loading> load(UnitId unit, std::byte* destination, Need, IoPriority) override {
    Loading loading;
    const Stream::Copy request =
        this->loading(unit, destination, units_[unit].data(), Stream::Direction::kOnDevice);
    loading.landed = context_.to_device->copy(request, [](const std::exception_ptr&) {});
    co_return loading;
  }
  Task<Fetched> fetch(UnitId unit, Need need, IoPriority) override {
    Fetched fetched;
    fetched.lease = co_await lease(home_bytes(unit), need, "parameter read");
    fetched.bytes = fetched.lease.bytes();
    co_await context_.copy_to_host(fetched.lease.bytes(), device_span(units_[unit]));
    co_return fetched;
  }
  Task<> store(UnitId, std::span<const Written>) override { co_return; }  // they are at home
  /// Ranks can exchange only in host memory.
  Task<> gather(UnitId unit, Need need) override {
    const ChunkTable& table = context_.table;
    if (reachable_) {
      co_await gather_in(unit, {units_[unit].data(), table.unit_param_bytes(unit)});
      co_return;
    }
    const Lease whole = co_await lease(table.unit_param_bytes(unit), need, "parameter gather");
    const std::size_t element_bytes = table.element_bytes(unit);
    const std::uint64_t begin = table.own_begin(unit) * element_bytes;
    const std::span<std::byte> own =
        whole.bytes().subspan(begin, table.unit(unit).slice_count * element_bytes);
    const DeviceSpan<std::byte> home = device_span(units_[unit]);
    co_await context_.copy_to_host(own, home.subspan(begin, own.size()));
    co_await gather_in(unit, whole.bytes());
    co_await context_.copy_to_device(home, whole.bytes());
  }

 private:
  bool reachable_;  // the CPU can read and write the device's memory
  bool zeros_;      // its memory was when the home was made
  std::vector<DeviceBuffer> units_;
};

}  // namespace ziggurat
