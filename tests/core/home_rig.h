// SPDX-License-Identifier: Apache-2.0
// tests/core/home_rig.h: what homes of parameters and gradients are made in, without an engine: a
// small model of one rank in chunks, an emulated device, a pool and a directory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "core/compute/compute.h"
#include "core/engine/runtime.h"
#include "core/schedule/context.h"
#include "tests/support/scratch_directory.h"
#include "tiers/device/host_device.h"
#include "tiers/store/striping.h"

namespace ziggurat::testing {

class HomeRig {
 public:
  /// `placement`: as parse_placement() takes it.
  explicit HomeRig(const std::string& placement) {
    runtime_->reactor.block_on(make(*this, parse_placement(placement)));
  }
  ~HomeRig() { runtime_->reactor.block_on(destroy(*this)); }
  HomeRig(const HomeRig&) = delete;
  HomeRig& operator=(const HomeRig&) = delete;

  Context& context() { return parts_->context; }
  const ChunkTable& table() const { return table_; }
  const std::vector<StripePlace>& places() const { return parts_->places; }
  Device& device() { return *device_; }
  template <class T>
  T run(Task<T> task) {
    return runtime_->reactor.block_on(std::move(task));
  }
  /// Memory of a work item; empty if none is needed.
  Task<Lease> item(std::uint64_t size_bytes) {
    if (size_bytes == 0) co_return Lease{};
    const LeaseRequest request{.size_bytes = size_bytes, .holder = "test"};
    co_return co_await parts_->pool->acquire(request);
  }

 private:
  struct Parts {
    Parts(HomeRig& rig, const Placement& placement)
        : io(rig.runtime_->io_engine(rig.runtime_->reactor, rig.directory_.path())),
          places{{.io = *io, .observers = {}, .directory = rig.directory_.path()}},
          cancel(rig.runtime_->reactor),
          pool(PinnedPool::create(rig.runtime_->reactor,
                                  {.budget_bytes = 8 * kMiB, .reserves = {}, .cancel = &cancel})),
          to_device(rig.device_->create_stream("host to device")),
          to_host(rig.device_->create_stream("device to host")),
          compute(make_compute(*rig.device_, rig.runtime_->reactor, *rig.runtime_->workers, {})),
          channels(*rig.runtime_->ranks, Place{}, {}),
          tasks(rig.runtime_->reactor),
          local_tasks(rig.runtime_->reactor),
          gates(cancel, rig.runtime_->reactor.clock(), rig.runtime_->metrics,
                rig.table_.unit_count()),
          lent(rig.runtime_->reactor, cancel),
          context{.reactor = rig.runtime_->reactor,
                  .workers = *rig.runtime_->workers,
                  .metrics = rig.runtime_->metrics,
                  .trace = nullptr,
                  .device = rig.device_.get(),
                  .to_device = to_device.get(),
                  .to_host = to_host.get(),
                  .compute = compute.get(),
                  .pool = *pool,
                  .ranks = channels,
                  .table = rig.table_,
                  .placement = placement,
                  .cancel = cancel,
                  .tasks = tasks,
                  .local_tasks = local_tasks,
                  .gates = gates,
                  .lent = lent,
                  .fail = {}} {}

    std::unique_ptr<IoEngine> io;
    std::vector<StripePlace> places;
    CancelScope cancel;
    std::unique_ptr<PinnedPool> pool;
    std::unique_ptr<Stream> to_device, to_host;
    std::unique_ptr<Compute> compute;
    RankChannels channels;
    WorkGroup tasks;
    WorkGroup local_tasks;
    UnitGates gates;
    LentMemory lent;
    Context context;
  };
  static Task<> make(HomeRig& rig, Placement placement) {
    rig.parts_.emplace(rig, placement);
    co_return;
  }
  static Task<> destroy(HomeRig& rig) {
    rig.parts_.reset();
    co_return;
  }

  static ModelSpec model() {
    ModelSpec model{.name = "homes", .units = {}};
    for (const std::int64_t rows : {90, 128, 300}) {
      const std::string name = "unit" + std::to_string(model.units.size());
      model.units.push_back({.name = name, .params = {{.name = name, .shape = {rows, 128}}}});
    }
    model.units[1].dtype = DType::kFloat32;
    return model;
  }

  ScratchDirectory directory_;
  std::unique_ptr<Runtime> runtime_ = Runtime::create({.threads = 2, .trace_path = ""});
  std::unique_ptr<Device> device_ = HostDevice::create(runtime_->reactor, 4 * kMiB);
  ChunkTable table_{model(), 1};  // chunks of a tile
  std::optional<Parts> parts_;
};

}  // namespace ziggurat::testing
