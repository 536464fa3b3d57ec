// SPDX-License-Identifier: Apache-2.0
// base/topology/pci_link.h: how a PCI device is connected, as the kernel tells.
#pragma once

#include <optional>
#include <string>

namespace ziggurat {

struct PciLink {
  int lanes = 0;
  double gigatransfers = 0;  ///< a second and lane, as "16.0 GT/s PCIe"
  int lanes_max = 0;         ///< what the device can do
  double gigatransfers_max = 0;

  /// Fewer lanes than the device has: the slot, or a riser, has no more. (An idle GPU lowers its
  /// speed by itself.)
  bool narrow() const noexcept { return lanes < lanes_max; }
  /// "16 lanes at 16 GT/s", with what the device can do where that is more.
  std::string text() const;
};

/// The link of the device at `address`, "0000:3b:00.0", from /sys under `root` ("" for this
/// machine). Nothing where the kernel does not tell, as in many virtual machines.
std::optional<PciLink> pci_link(const std::string& root, const std::string& address);

}  // namespace ziggurat
