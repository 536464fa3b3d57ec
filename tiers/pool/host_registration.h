// SPDX-License-Identifier: Apache-2.0
// tiers/pool/host_registration.h: host memory that a device may copy to and from.
#pragma once

#include <cstddef>
#include <span>

namespace ziggurat {

/// A registration. The owner of the memory holds it, and so does every copy of the memory that is
/// under way: the memory is registered until the last of them has gone.
class HostRegistration {
 public:
  virtual ~HostRegistration() = default;
  /// Returns whether the device was lost while it copied to or from some of these bytes. Then
  /// nobody knows whether the transfer has ended, so the bytes must never be used again, nor
  /// unmapped. Thread-safe; cheap unless the device is lost.
  virtual bool quarantined(std::span<const std::byte> memory) const noexcept = 0;
};

}  // namespace ziggurat
