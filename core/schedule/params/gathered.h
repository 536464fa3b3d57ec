// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/gathered.h: units that are gathered from all ranks (stage 3). For
// make_residency.cc.
//
// Every rank takes part in a gather, so all ranks must decide alike. What is gathered and dropped,
// and in which order, therefore depends only on the trainer's calls, the learned order and sizes.
// It is decided at the instant of a call and never depends on timing. Gathered units have memory of
// their own (unit_gather.h), so that no accumulator can drive parameters out on one rank and not on
// another. A unit counts as present as soon as its gather is decided; acquire() waits until it has
// landed.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "core/schedule/params/brought.h"

namespace ziggurat {

class GatheredResidency final : public Brought {
 public:
  GatheredResidency(Context& context, UnitParamHome& home, const ResidencyLimits& limits,
                    std::unique_ptr<UnitGather> gather)
      : Brought(context, std::make_unique<TableUnits>(context, home), limits),
        gather_(std::move(gather)),
        flights_(context.table.unit_count()) {}

  Task<Acquired> acquire(UnitId unit, Room) override {
    context_.cancel.check();
    ZIGGURAT_CHECK(unit < slots_.size(), "unit {} of {}", unit, slots_.size());
    order_.used(unit);
    if (!is_there(unit) && !start(unit, 0)) {
      const std::uint64_t size_bytes = context_.table.unit_param_bytes(unit);
      throw room_.exhausted(size_bytes, fmt::format("unit {} ({}) does not fit beside the units in "
                                                    "use",
                                                    unit, format_bytes(size_bytes)));
    }
    ++slots_[unit].pins;
    prefetch();
    const std::shared_ptr<UnitGather::Flight> flight = flights_[unit];
    context_.metrics.add(flight->done.is_set() ? Counter::kPrefetchHits : Counter::kPrefetchMisses,
                         1);
    co_await context_.gates.wait(unit);
    if (!flight->done.is_set()) {
      const CountedTime waited(context_.reactor.clock(), context_.metrics, Counter::kWaitRanksNs);
      gather_->hurry(*flight);
      co_await flight->done.wait();
    } else {
      co_await flight->done.wait();  // rethrows a failure
    }
    const auto memory = reinterpret_cast<std::uintptr_t>(flight->memory);
    co_return Acquired{.params = {memory, units_->used_bytes(unit)}, .landed = {}};
  }
  Task<> readers_done(UnitId) override { co_return; }  // nobody reads at home
  Task<> quiesce() override { return gather_->idle(); }
  std::uint64_t take_order() noexcept override { return gather_->take_order(); }

 private:
  /// Decides that `unit` is gathered next. To make room it may drop units whose next use is farther
  /// than `nearer_than`. Returns false if there is still no room.
  bool start(UnitId unit, std::uint64_t nearer_than) {
    Slot& slot = slots_[unit];
    ZIGGURAT_CHECK(slot.pins == 0, "unit {} is stale while in use", unit);
    drop(unit);
    const Need need{.generation = generation_, .position = 0};
    std::shared_ptr<UnitGather::Flight>& flight = flights_[unit];
    do {
      flight = gather_->start(unit, need, context_.gates.gate(unit));
    } while (!flight && drop_farthest(nearer_than));
    if (!flight) return false;
    slot.generation = generation_;
    slot.state = State::kPresent;
    return true;
  }
  bool bring_ahead(UnitId unit) override { return start(unit, order_.next_use(unit)); }
  void free(UnitId unit) override { gather_->free(std::exchange(flights_[unit], {})); }
  void used_until(UnitId unit, const Event& read) override {
    if (flights_[unit]) gather_->used_until(*flights_[unit], read);
  }

  std::unique_ptr<UnitGather> gather_;
  std::vector<std::shared_ptr<UnitGather::Flight>> flights_;  // per unit
};

}  // namespace ziggurat
