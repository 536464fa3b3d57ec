// SPDX-License-Identifier: Apache-2.0
// tiers/host_registration.h: host memory that a device may copy to and from.
#pragma once

#include <cstddef>
#include <span>

namespace ziggurat {

/// Held by whoever owns the memory, and by every copy of it that is under way: the memory is
/// registered until the last of them has gone.
class HostRegistration {
 public:
  virtual ~HostRegistration() = default;
  /// The device was lost while it copied to or from some of these bytes. Nobody can say any more
  /// whether the transfer has ended, so they must never be used again, nor unmapped. Thread-safe,
  /// cheap while the device is there.
  virtual bool quarantined(std::span<const std::byte> memory) const noexcept = 0;
};

}  // namespace ziggurat
