// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes/grads_on_device.h: gradients in the device's memory, a buffer for each chunk.
// For make_grad_home.cc.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/schedule/homes/grad_home.h"

namespace ziggurat {

class DeviceGradHome final : public UnitGradHome {
 public:
  DeviceGradHome(Context& context, AllocateDevice allocate)
      : UnitGradHome(context),
        reachable_(context.device->host_accessible()),
        allocate_(std::move(allocate)),
        chunks_(context.table.chunks().size()) {}

  std::uint64_t item_bytes(const Chunk& chunk) const noexcept override {
    return reachable_ || chunk.constant ? 0 : chunk.param_bytes();
  }
  Task<> accept(ChunkId id, DeviceSpan<const std::byte> gradient, Need) override {
    chunks_[id] = co_await allocate_(gradient.size(), Purpose::kGradients);
    const Stream::Copy request{.destination = chunks_[id].data(),
                               .source = reinterpret_cast<const std::byte*>(gradient.address()),
                               .size_bytes = gradient.size(),
                               .direction = Stream::Direction::kOnDevice};
    co_await copy(context_.reactor, *context_.to_host, request);
  }
  Task<TypedSpan<const std::byte>> fetch(ChunkId id, std::span<std::byte> item) override {
    TypedSpan<const std::byte> grad{context_.table.chunk_dtype(id), item};
    if (reachable_) {
      grad.bytes = {chunks_[id].data(), chunks_[id].size_bytes()};
    } else {
      co_await context_.copy_to_host(item, device_span(chunks_[id]));
    }
    co_return grad;
  }
  Task<TypedDeviceSpan<const std::byte>> fetch_to_device(ChunkId id, std::span<std::byte>,
                                                         DeviceSpan<std::byte>) override {
    co_return TypedDeviceSpan<const std::byte>{context_.table.chunk_dtype(id),
                                               device_span(chunks_[id])};
  }
  void drop(ChunkId id) noexcept override { chunks_[id] = {}; }

 private:
  bool reachable_;  // the CPU can read the device's memory
  AllocateDevice allocate_;
  std::vector<DeviceBuffer> chunks_;
};

}  // namespace ziggurat
