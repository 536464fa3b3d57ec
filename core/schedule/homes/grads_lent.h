// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes/grads_lent.h: gradients in the trainer's memory, which it lends for a step:
// without padding, in any type. They are used where they are; those of a packed unit are brought
// together in fp32. Parameters may have a sum on NVMe instead. For make_grad_home.cc.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/numerics/typed_value.h"
#include "core/schedule/homes/grad_home.h"
#include "core/schedule/homes/grad_sums.h"

namespace ziggurat {

class LentGradHome final : public GradHome {
 public:
  /// `sums` may be null.
  LentGradHome(Context& context, GradSums* sums) : GradHome(context), sums_(sums) {}

  std::uint64_t item_bytes(const Chunk& chunk) const noexcept override {
    if (chunk.constant) return 0;
    const bool gathers = sums_ != nullptr || context_.table.is_packed(chunk.unit);
    return gathers ? chunk.count * sizeof(float) : 0;
  }
  bool absent(ChunkId id) const override {
    return std::ranges::all_of(context_.table.param_runs(id),
                               [&](const ParamRun& run) { return absent(run); });
  }
  bool absent(const ParamRun& run) const noexcept override {
    return context_.lent.gradient(run.lent).bytes.empty() && !summed(run);
  }
  Task<TypedSpan<const std::byte>> fetch(ChunkId id, std::span<std::byte> item) override {
    const std::vector<ParamRun> runs = context_.table.param_runs(id);
    const bool some_summed =
        std::ranges::any_of(runs, [&](const ParamRun& run) { return summed(run); });
    const bool packed = context_.table.is_packed(context_.table.chunk(id).unit);
    if (!packed && !some_summed) co_return lent(runs.front());
    const TypedSpan<std::byte> all{DType::kFloat32, item};
    TypedSpan<const std::byte> its = all;
    if (some_summed) its = co_await sums_->fetch(id, item);
    if (packed) co_await widen_lent(id, runs, all);
    co_return packed ? its : its.subspan(0, runs.front().count);
  }

 private:
  bool summed(const ParamRun& run) const noexcept {
    return sums_ != nullptr && sums_->taken(run.lent);
  }
  TypedSpan<const std::byte> lent(const ParamRun& run) const noexcept {
    return context_.lent.gradient(run.lent).subspan(run.first, run.count);
  }
  /// Brings those of `runs` together that have a lent gradient.
  Task<> widen_lent(ChunkId id, const std::vector<ParamRun>& runs, TypedSpan<std::byte> all) {
    const std::function<void()> job = [&] {
      for (const ParamRun& run : runs) {
        if (absent(run) || summed(run)) continue;
        const TypedSpan<const std::byte> from = lent(run);
        const std::span<float> to = all.as<float>().subspan(run.begin, run.count);
        for (std::size_t i = 0; i < to.size(); ++i)
          to[i] = value_at(from.dtype, from.bytes.data(), i);
      }
    };
    const LentMemory::Use its(context_.lent);
    co_await context_.run_near(id, {"gather gradients", 2 * all.bytes.size()}, job);
  }

  GradSums* sums_;
};

}  // namespace ziggurat
