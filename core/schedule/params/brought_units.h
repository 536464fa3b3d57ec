// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/brought_units.h: what a residency brings to the device: the units of the
// table from their home, or a trainer's units from all ranks (core/engine/lent/whole_units.h).
// Reactor's thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/schedule/context.h"
#include "core/schedule/homes/param_home.h"

namespace ziggurat {

class BroughtUnits {
 public:
  BroughtUnits() = default;
  virtual ~BroughtUnits() = default;
  BroughtUnits(const BroughtUnits&) = delete;
  BroughtUnits& operator=(const BroughtUnits&) = delete;

  virtual std::size_t count() const noexcept = 0;
  /// Returns the unit's elements, in which limits and distances are counted.
  virtual std::uint64_t elements(UnitId unit) const = 0;
  /// Returns the memory that the unit takes on the device.
  virtual std::uint64_t device_bytes(UnitId unit) const = 0;
  /// Returns how much of that its readers use.
  virtual std::uint64_t used_bytes(UnitId unit) const = 0;
  virtual bool optional(UnitId unit) const = 0;
  /// Whether steps change the unit.
  virtual bool trained(UnitId unit) const = 0;
  virtual std::string name(UnitId unit) const = 0;

  /// Waits until the unit is at home at the generation that the trainer uses. If a trainer waits
  /// (`awaited`), the time counts as waiting for the sweep.
  virtual Task<> at_home(UnitId unit, bool awaited) = 0;
  /// Brings the unit to `destination`, as UnitParamHome::load() does.
  virtual Task<UnitParamHome::Loading> load(UnitId unit, std::byte* destination, Need need,
                                            IoPriority priority) = 0;
  /// Raises the priority of a load of the unit that is under way.
  virtual void hurry(UnitId unit) = 0;
};

/// The units of the table.
class TableUnits final : public BroughtUnits {
 public:
  TableUnits(Context& context, UnitParamHome& home) : context_(context), home_(home) {}

  std::size_t count() const noexcept override { return context_.table.unit_count(); }
  std::uint64_t elements(UnitId unit) const override { return context_.table.unit(unit).count; }
  std::uint64_t device_bytes(UnitId unit) const override {
    return context_.table.unit_param_bytes(unit);
  }
  std::uint64_t used_bytes(UnitId unit) const override {
    return elements(unit) * size_bytes(context_.table.dtype(unit));
  }
  bool optional(UnitId unit) const override { return spec(unit).optional; }
  bool trained(UnitId unit) const override { return spec(unit).stored(); }
  std::string name(UnitId unit) const override { return spec(unit).name; }

  Task<> at_home(UnitId unit, bool awaited) override {
    if (awaited) {
      co_await context_.gates.wait(unit);
    } else {
      co_await context_.gates.gate(unit).wait();
    }
  }
  Task<UnitParamHome::Loading> load(UnitId unit, std::byte* destination, Need need,
                                    IoPriority priority) override {
    return home_.load(unit, destination, need, priority);
  }
  void hurry(UnitId unit) override { home_.hurry(unit); }

 private:
  const UnitSpec& spec(UnitId unit) const { return context_.table.model().units[unit]; }

  Context& context_;
  UnitParamHome& home_;
};

}  // namespace ziggurat
