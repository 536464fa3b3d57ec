// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes/grads_on_host.h: gradients in host memory, a lease for each chunk. For
// make_grad_home.cc.
#pragma once

#include <span>
#include <vector>

#include "core/schedule/homes/grad_home.h"

namespace ziggurat {

class HostGradHome final : public UnitGradHome {
 public:
  explicit HostGradHome(Context& context)
      : UnitGradHome(context), chunks_(context.table.chunks().size()) {}

  Task<> accept(ChunkId id, DeviceSpan<const std::byte> gradient, Need need) override {
    chunks_[id] = co_await copied(id, gradient, need);
  }
  Task<TypedSpan<const std::byte>> fetch(ChunkId id, std::span<std::byte>) override {
    co_return TypedSpan<const std::byte>{context_.table.chunk_dtype(id), chunks_[id].bytes()};
  }
  void drop(ChunkId id) noexcept override { chunks_[id] = {}; }

 private:
  std::vector<Lease> chunks_;
};

}  // namespace ziggurat
