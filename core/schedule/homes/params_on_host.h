// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes/params_on_host.h: parameters in host memory, updated where they are. For
// make_param_home.cc.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/schedule/homes/param_home.h"

namespace ziggurat {

class HostParamHome final : public UnitParamHome {
 public:
  explicit HostParamHome(Context& context) : UnitParamHome(context) {
    units_.resize(context.table.unit_count());
    for (UnitId u = 0; u < units_.size(); ++u) {
      if (!context.table.has_home(u)) continue;
      units_[u] = context.permanent_lease(Purpose::kParams, home_bytes(u), "parameters",
                                          context.node_of_unit(u));
    }
  }

  std::uint64_t item_bytes(const Chunk&) const noexcept override { return 0; }
  TypedSpan<std::byte> destination(ChunkId id, std::span<std::byte>) const noexcept override {
    return in_unit(id, units_[context_.table.chunk(id).unit].bytes().data());
  }
  Task<> publish(ChunkId, TypedSpan<const std::byte>, std::span<const ParamRun>) override {
    co_return;
  }
  bool in_memory(UnitId) const noexcept override { return true; }

  Task<Fetched> fetch(UnitId unit, Need, IoPriority) override {
    Fetched fetched;
    fetched.bytes = units_[unit].bytes();
    co_return fetched;
  }
  Task<> gather(UnitId unit, Need) override { co_await gather_in(unit, units_[unit].bytes()); }
  Task<> store(UnitId unit, std::span<const Written> written) override {
    co_await copy_written(written, units_[unit].bytes());
  }

 private:
  std::vector<Lease> units_;
};

}  // namespace ziggurat
