// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes/grads_on_nvme.h: gradients in a file on NVMe, an item for each chunk. For
// make_grad_home.cc.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/schedule/homes/checked_items.h"
#include "core/schedule/homes/grad_home.h"

namespace ziggurat {

class NvmeGradHome final : public UnitGradHome {
 public:
  NvmeGradHome(Context& context, std::vector<StripePlace> places) : UnitGradHome(context) {
    std::vector<std::uint64_t> sizes;
    for (const Chunk& chunk : context.table.chunks())
      sizes.push_back(chunk.constant ? 0 : chunk.param_bytes());
    file_ = SwapFile::create(context.reactor, std::move(places), std::move(sizes));
  }

  std::uint64_t item_bytes(const Chunk& chunk) const noexcept override {
    return chunk.constant ? 0 : chunk.param_bytes();
  }
  Task<> accept(ChunkId id, DeviceSpan<const std::byte> gradient, Need need) override {
    const Lease lease = co_await copied(id, gradient, need);
    co_await write_hashed(context_, *file_, id, lease.bytes(), IoPriority::kWriteBack,
                          context_.node_of(id));
  }
  Task<TypedSpan<const std::byte>> fetch(ChunkId id, std::span<std::byte> item) override {
    co_await read_verified(context_, *file_, id, item, IoPriority::kPrefetch, context_.node_of(id));
    co_return TypedSpan<const std::byte>{context_.table.chunk_dtype(id), item};
  }

 private:
  std::unique_ptr<SwapFile> file_;  // an item for each chunk
};

}  // namespace ziggurat
