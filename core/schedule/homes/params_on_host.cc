// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes/params_on_host.cc: parameters in host memory, updated where they are.
#include "core/schedule/homes/param_home.h"

namespace ziggurat {
namespace {

class HostParamHome final : public UnitParamHome {
 public:
  explicit HostParamHome(Context& context) : UnitParamHome(context) {
    for (UnitId u = 0; u < context.table.unit_count(); ++u) {
      units_.push_back(context.permanent_lease(Purpose::kParams, home_bytes(u), "parameters",
                                               context.node_of_unit(u)));
    }
  }

  std::uint64_t item_bytes(const Chunk&) const noexcept override { return 0; }
  TypedSpan<std::byte> destination(ChunkId id, std::span<std::byte>) const noexcept override {
    return in_unit(id, units_[context_.table.chunk(id).unit].bytes().data());
  }
  Task<> publish(ChunkId, TypedSpan<const std::byte>, std::span<const ParamRun>) override {
    co_return;
  }
  bool in_memory() const noexcept override { return true; }

  Task<Fetched> fetch(UnitId unit, Need, IoPriority) override {
    Fetched fetched;
    fetched.bytes = units_[unit].bytes();
    co_return fetched;
  }
  Task<> gather(UnitId unit, Need) override { co_await gather_in(unit, units_[unit].bytes()); }

 private:
  std::vector<Lease> units_;
};

}  // namespace

std::unique_ptr<UnitParamHome> params_on_host(Context& context) {
  return std::make_unique<HostParamHome>(context);
}

}  // namespace ziggurat
