// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes/params_streamed.h: parameters of a trainer that lends some and leaves others
// to the engine, which are in a home of units. A unit that has both (packed before it was streamed)
// is there as a whole, and its lent parameters are copied. For make_param_home.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/schedule/homes/param_home.h"
#include "core/schedule/homes/params_lent.h"

namespace ziggurat {

class StreamedParamHome final : public UnitParamHome {
 public:
  StreamedParamHome(Context& context, std::unique_ptr<UnitParamHome> home)
      : UnitParamHome(context), home_(std::move(home)), lent_(context) {}

  std::uint64_t item_bytes(const Chunk& chunk) const noexcept override {
    return of(chunk.unit).item_bytes(chunk);
  }
  /// Without padding, as gradients are lent.
  TypedSpan<std::byte> destination(ChunkId id, std::span<std::byte> item) const noexcept override {
    const ChunkTable& table = context_.table;
    const TypedSpan<std::byte> all = of(table.chunk(id).unit).destination(id, item);
    return table.is_packed(table.chunk(id).unit) ? all : all.subspan(0, table.real_count(id));
  }
  Task<> bring(ChunkId id, std::span<std::byte> item, std::span<const ParamRun> runs) override {
    if (!context_.table.has_home(context_.table.chunk(id).unit)) {
      co_await lent_.bring(id, item, runs);
      co_return;
    }
    co_await home_->bring(id, item, runs);
    const std::vector<ParamRun> lent = lent_of(id, runs);
    co_await lent_.copy_from_lent(id, destination(id, item), lent);
  }
  Task<> publish(ChunkId id, TypedSpan<const std::byte> values,
                 std::span<const ParamRun> runs) override {
    if (!context_.table.has_home(context_.table.chunk(id).unit)) {
      co_await lent_.publish(id, values, runs);
      co_return;
    }
    // Homes keep whole chunks. The padding follows the values where destination() is.
    const std::span<const std::byte> whole(values.bytes.data(),
                                           context_.table.chunk(id).param_bytes());
    co_await home_->publish(id, {values.dtype, whole}, runs);
    const std::vector<ParamRun> lent = lent_of(id, runs);
    co_await lent_.copy_to_lent(id, values, lent);
  }
  bool in_memory(UnitId unit) const noexcept override { return of(unit).in_memory(unit); }
  bool begins_with_zeros() const noexcept override { return home_->begins_with_zeros(); }

  bool used_at_home() const noexcept override { return home_->used_at_home(); }
  DeviceSpan<const std::byte> view(UnitId unit) const noexcept override {
    return home_->view(unit);
  }
  void used_until(UnitId unit, const Event& read) override { home_->used_until(unit, read); }
  Task<Loading> load(UnitId unit, std::byte* destination, Need need, IoPriority priority) override {
    return home_->load(unit, destination, need, priority);
  }
  Task<Fetched> fetch(UnitId unit, Need need, IoPriority priority) override {
    return home_->fetch(unit, need, priority);
  }
  Task<> gather(UnitId unit, Need need) override { return home_->gather(unit, need); }
  void hurry(UnitId unit) override { home_->hurry(unit); }
  Task<> store(UnitId unit, std::span<const Written> written) override {
    return home_->store(unit, written);
  }

 private:
  const ParamHome& of(UnitId unit) const noexcept {
    if (context_.table.has_home(unit)) return *home_;
    return lent_;
  }
  /// Returns those of `runs` that the trainer lends.
  std::vector<ParamRun> lent_of(ChunkId id, std::span<const ParamRun> runs) const {
    const UnitSpec& unit = context_.table.model().units[context_.table.chunk(id).unit];
    std::vector<ParamRun> lent(runs.begin(), runs.end());
    std::erase_if(lent,
                  [&](const ParamRun& run) { return unit.params[run.param].streamed.has_value(); });
    return lent;
  }

  std::unique_ptr<UnitParamHome> home_;
  LentParamHome lent_;
};

}  // namespace ziggurat
