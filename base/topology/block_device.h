// SPDX-License-Identifier: Apache-2.0
// base/topology/block_device.h: finds the PCI devices that hold the bytes of a path, through
// partitions, dm, md and loop.
//
// Every function takes the root under which /proc and /sys are read ("" for this machine), so that
// tests can build one.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace ziggurat::internal {

/// Returns the PCI addresses ("0000:65:00.0") of the drives under block device `device`, sorted,
/// each once. Empty if there are none.
std::vector<std::string> pci_addresses_of_device(const std::string& root, dev_t device);

/// Returns the block device that holds `path` or its nearest existing parent; for filesystems with
/// anonymous numbers (btrfs), the device that mountinfo names. 0 if there is none.
dev_t block_device_of_path(const std::string& root, const std::string& path);

}  // namespace ziggurat::internal
