// SPDX-License-Identifier: Apache-2.0
// core/compute/cpu_compute.h: Compute on the CPU's workers, over a device that is emulated in host
// memory.
#pragma once

#include "core/compute/compute.h"

namespace ziggurat {

class CpuCompute final : public Compute {
 public:
  /// Keeps both references: the reactor and the workers must outlive the CpuCompute.
  CpuCompute(Reactor& reactor, Workers& workers) : reactor_(reactor), workers_(workers) {}

  std::span<std::byte> host_view(DeviceSpan<std::byte> bytes) const noexcept override;
  Task<> after(const Event& event) override { return event.wait(); }
  Task<Event> clear(DeviceSpan<std::byte> bytes) override;
  Task<> round(const Rounding& rounding) override;
  Task<> quantize(const Quantizing& quantizing) override;
  Task<> update(const Update& update) override;

 private:
  Reactor& reactor_;
  Workers& workers_;
};

}  // namespace ziggurat
