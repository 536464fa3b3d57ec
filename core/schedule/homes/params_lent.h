// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes/params_lent.h: parameters in the trainer's memory, which it lends. They are
// updated where they are; those of a packed unit in the work item's memory. For make_param_home.cc.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>

#include "base/bytes.h"
#include "core/schedule/homes/param_home.h"

namespace ziggurat {

class LentParamHome final : public ParamHome {
 public:
  explicit LentParamHome(Context& context) : ParamHome(context) {}

  std::uint64_t item_bytes(const Chunk& chunk) const noexcept override {
    return context_.table.is_packed(chunk.unit) ? chunk.param_bytes() : 0;
  }
  TypedSpan<std::byte> destination(ChunkId id, std::span<std::byte> item) const noexcept override {
    const ChunkTable& table = context_.table;
    const Chunk& chunk = table.chunk(id);
    if (table.is_packed(chunk.unit)) return {table.dtype(chunk.unit), item};
    const ParamId param = *table.model().units[chunk.unit].params.front().lent;
    return context_.lent.param(param).subspan(chunk.begin, table.real_count(id));
  }
  Task<> bring(ChunkId id, std::span<std::byte> item, std::span<const ParamRun> runs) override {
    if (context_.table.is_packed(context_.table.chunk(id).unit))
      co_await copy_from_lent(id, destination(id, item), runs);
  }
  Task<> publish(ChunkId id, TypedSpan<const std::byte> values,
                 std::span<const ParamRun> runs) override {
    if (context_.table.is_packed(context_.table.chunk(id).unit))
      co_await copy_to_lent(id, values, runs);
  }
  bool in_memory(UnitId) const noexcept override { return true; }

  /// Copy the parameters of `runs` between the trainer's memory and `values`, a chunk's.
  Task<> copy_from_lent(ChunkId id, TypedSpan<std::byte> values, std::span<const ParamRun> runs) {
    if (runs.empty()) co_return;
    const std::function<void()> job = [&] {
      for (const ParamRun& run : runs)
        copy_bytes(lent(run).bytes, values.subspan(run.begin, run.count).bytes);
    };
    const LentMemory::Use its(context_.lent);
    co_await context_.run_near(id, {"bring params", 2 * values.bytes.size()}, job);
  }
  Task<> copy_to_lent(ChunkId id, TypedSpan<const std::byte> values,
                      std::span<const ParamRun> runs) {
    if (runs.empty()) co_return;
    const std::function<void()> job = [&] {
      for (const ParamRun& run : runs)
        copy_bytes(values.subspan(run.begin, run.count).bytes, lent(run).bytes);
    };
    const LentMemory::Use its(context_.lent);
    co_await context_.run_near(id, {"publish params", 2 * values.bytes.size()}, job);
  }

 private:
  TypedSpan<std::byte> lent(const ParamRun& run) const noexcept {
    return context_.lent.param(run.lent).subspan(run.first, run.count);
  }
};

}  // namespace ziggurat
