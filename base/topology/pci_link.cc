// SPDX-License-Identifier: Apache-2.0
// base/topology/pci_link.cc: reads four files of /sys/bus/pci (since kernel 4.13).
#include "base/topology/pci_link.h"

#include <fmt/format.h>

#include <fstream>

namespace ziggurat {
namespace {

/// Returns the number at the begin of a file; 0 if there is none.
double figure_in(const std::string& file) {
  std::ifstream stream(file);
  double number = 0;
  return stream >> number ? number : 0;  // the file has "Unknown" for a link that is down
}

}  // namespace

std::string PciLink::text() const {
  std::string said = fmt::format("{} lanes at {:g} GT/s", lanes, gigatransfers);
  if (narrow() || gigatransfers < gigatransfers_max)
    said += fmt::format(", of {} at {:g}", lanes_max, gigatransfers_max);
  return said;
}

std::optional<PciLink> pci_link(const std::string& root, const std::string& address) {
  const std::string device = root + "/sys/bus/pci/devices/" + address + "/";
  const PciLink link{.lanes = static_cast<int>(figure_in(device + "current_link_width")),
                     .gigatransfers = figure_in(device + "current_link_speed"),
                     .lanes_max = static_cast<int>(figure_in(device + "max_link_width")),
                     .gigatransfers_max = figure_in(device + "max_link_speed")};
  if (link.lanes == 0 || link.gigatransfers == 0) return {};
  return link;
}

}  // namespace ziggurat
