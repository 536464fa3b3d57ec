// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/at_home.h: units that a trainer uses where they live, on the device. For
// make_residency.cc.
#pragma once

#include <cstddef>
#include <vector>

#include "base/check.h"
#include "core/schedule/params/residency.h"

namespace ziggurat {

class AtHomeResidency final : public Residency {
 public:
  AtHomeResidency(Context& context, UnitParamHome& home)
      : Residency(context), home_(home), brought_(context, home), units_(brought_.count()) {}

  Task<Acquired> acquire(UnitId unit, Room) override {
    context_.cancel.check();
    co_await context_.gates.wait(unit);
    ++units_[unit].pins;
    co_return Acquired{.params = home_.view(unit).first(brought_.used_bytes(unit)), .landed = {}};
  }

  void release(UnitId unit, const Event& read) override {
    Unit& its = units_[unit];
    ZIGGURAT_CHECK(its.pins > 0, "unit {} is released more often than acquired", unit);
    --its.pins;
    std::erase_if(its.readers, [](const Event& other) { return other.happened(); });
    if (read.happened()) return;
    its.readers.push_back(read);
    home_.used_until(unit, read);
  }

  Task<> readers_done(UnitId unit) override {
    const std::vector<Event> readers = units_[unit].readers;
    for (const Event& read : readers) co_await read.wait();
  }

 private:
  struct Unit {
    std::size_t pins = 0;
    std::vector<Event> readers{};
  };
  UnitParamHome& home_;
  TableUnits brought_;
  std::vector<Unit> units_;
};

}  // namespace ziggurat
