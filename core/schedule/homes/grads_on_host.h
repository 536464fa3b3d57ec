// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes/grads_on_host.h: gradients in host memory, a lease for each chunk, for good:
// with the smallest budget they would otherwise lie between what comes and goes, and leave no room
// in a row. For make_grad_home.cc.
#pragma once

#include <span>
#include <vector>

#include "core/schedule/homes/grad_home.h"

namespace ziggurat {

class HostGradHome final : public UnitGradHome {
 public:
  explicit HostGradHome(Context& context)
      : UnitGradHome(context), chunks_(context.table.chunks().size()) {
    for (ChunkId id = 0; id < chunks_.size(); ++id) {
      const Chunk& chunk = context.table.chunk(id);
      if (chunk.constant) continue;
      chunks_[id] = context.permanent_lease(Purpose::kGradients, chunk.param_bytes(), "gradient",
                                            context.node_of(id));
    }
  }

  Task<> accept(ChunkId id, DeviceSpan<const std::byte> gradient, Need) override {
    co_await context_.copy_to_host(chunks_[id].bytes(), gradient);
  }
  Task<TypedSpan<const std::byte>> fetch(ChunkId id, std::span<std::byte>) override {
    co_return TypedSpan<const std::byte>{context_.table.chunk_dtype(id), chunks_[id].bytes()};
  }

 private:
  std::vector<Lease> chunks_;
};

}  // namespace ziggurat
