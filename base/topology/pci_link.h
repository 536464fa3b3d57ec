// SPDX-License-Identifier: Apache-2.0
// base/topology/pci_link.h: how a PCI device is connected, as the kernel reports it.
#pragma once

#include <optional>
#include <string>

namespace ziggurat {

struct PciLink {
  int lanes = 0;
  double gigatransfers = 0;  ///< per second and lane, as "16.0 GT/s PCIe"
  int lanes_max = 0;         ///< the most that the device supports
  double gigatransfers_max = 0;

  /// Returns whether the link has fewer lanes than the device: the slot, or a riser, has no more.
  /// (Speed is not compared, because an idle GPU lowers its own.)
  bool narrow() const noexcept { return lanes < lanes_max; }
  /// Formats the link: "16 lanes at 16 GT/s", and what the device supports if that is more.
  std::string text() const;
};

/// Returns the link of the device at `address`, "0000:3b:00.0", from /sys under `root` ("" for this
/// machine). Nothing if the kernel does not tell, as in many virtual machines.
std::optional<PciLink> pci_link(const std::string& root, const std::string& address);

}  // namespace ziggurat
