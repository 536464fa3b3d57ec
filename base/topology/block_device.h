// SPDX-License-Identifier: Apache-2.0
// base/topology/block_device.h: from a path to the PCI devices that hold its bytes, through
// partitions, dm, md and loop.
//
// Every function takes the root that /proc and /sys are read under ("" for this machine), so that
// tests can build one.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace ziggurat::internal {

/// PCI addresses ("0000:65:00.0") of the drives under block device `device`; sorted, each once.
/// Empty where there are none.
std::vector<std::string> pci_addresses_of_device(const std::string& root, dev_t device);

/// Block device that holds `path`'s nearest existing parent; for filesystems with anonymous numbers
/// (btrfs) the device that mountinfo names. 0 where there is none.
dev_t block_device_of_path(const std::string& root, const std::string& path);

}  // namespace ziggurat::internal
