// SPDX-License-Identifier: Apache-2.0
// core/schedule/optimizer/device_staging.h: a little device memory for updates on the device if
// parameters or gradients live elsewhere. A chunk's gradient is copied here before its update, and
// its new parameters are copied away afterwards. There is room for a few chunks, so that one is
// updated while the gradient of the next arrives and the parameters of the previous one leave.
// Reactor's thread only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/bytes.h"
#include "core/schedule/context.h"

namespace ziggurat {

class DeviceStaging {
 public:
  /// The number of chunks that have room at once.
  static constexpr std::size_t kItems = 3;
  /// The alignment at which kernels need the parts of an item to begin.
  static constexpr std::uint64_t kAlignment = 256;
  /// Returns the bytes that one chunk takes if the device updates the first `device_chunks` chunks;
  /// 0 if parameters and gradients live on the device.
  static std::uint64_t item_bytes(const ChunkTable& table, const Placement& placement,
                                  std::size_t device_chunks) {
    std::uint64_t largest = 0;
    for (const Chunk& chunk : table.chunks().first(device_chunks))
      if (!chunk.constant) largest = std::max(largest, round_up(chunk.param_bytes(), kAlignment));
    const std::uint64_t parts =
        (placement.params != Tier::kDevice ? 1 : 0) + (placement.grads != Tier::kDevice ? 1 : 0);
    return parts * largest;
  }

  /// Errors: kResourceExhausted.
  DeviceStaging(Context& context, std::size_t device_chunks) : returned_(context.cancel) {
    const std::uint64_t size_bytes = item_bytes(context.table, context.placement, device_chunks);
    const bool needed = device_chunks > 0 && !context.device->host_accessible();
    for (std::size_t i = 0; needed && i < kItems; ++i) {
      Item item{.memory = {}, .param = {}, .grad = {}};
      if (size_bytes > 0) {
        item.memory = context.device->allocate(size_bytes, Purpose::kStaging);
        const DeviceSpan<std::byte> all = device_span(item.memory);
        const bool params = context.placement.params != Tier::kDevice;
        const bool both = params && context.placement.grads != Tier::kDevice;
        item.param = params ? all : all.first(0);
        item.grad = both ? all.subspan(size_bytes / 2, size_bytes / 2) : all;
      }
      spare_.push_back(std::move(item));
    }
  }

  struct Item {
    DeviceBuffer memory;
    DeviceSpan<std::byte> param;  ///< for ParamHome::destination_on_device
    DeviceSpan<std::byte> grad;   ///< for GradHome::fetch_to_device
  };
  /// Waits until an item is free, and takes it. The holder of an item never waits for a lease.
  Task<Item> take() {
    while (spare_.empty()) {
      returned_.reset();
      co_await returned_.wait();
    }
    Item item = std::move(spare_.back());
    spare_.pop_back();
    co_return item;
  }
  /// Returns an item to or from which nothing is copied any more.
  void give_back(Item item) {
    spare_.push_back(std::move(item));
    returned_.set();
  }

 private:
  std::vector<Item> spare_;
  Signal returned_;
};

}  // namespace ziggurat
