// SPDX-License-Identifier: Apache-2.0
// core/compute/costed_compute.h: the twin of a GPU's Compute, in virtual time: each operation takes
// the time of the bytes that it reads and writes in the device's own memory, on one stream.
#pragma once

#include "core/compute/compute.h"
#include "tiers/device/costed_device.h"

namespace ziggurat {

class CostedCompute final : public Compute {
 public:
  /// The device must outlive the CostedCompute.
  explicit CostedCompute(CostedDevice& device) : stream_(device.create_costed_stream("compute")) {}

  std::span<std::byte> host_view(DeviceSpan<std::byte>) const noexcept override { return {}; }
  Task<> after(const Event& event) override;
  Task<Event> clear(DeviceSpan<std::byte> bytes) override;
  Task<> round(const Rounding& rounding) override;
  Task<> quantize(const Quantizing& quantizing) override;
  Task<> update(const Update& update) override;

 private:
  std::unique_ptr<CostedStream> stream_;
};

}  // namespace ziggurat
