// SPDX-License-Identifier: Apache-2.0
// integrations/measure/file_facts.h: what the kernel knows about an open file: its extents, how
// much of it is in the page cache, whether O_DIRECT is in force, and the drive below.
#pragma once

#include <cstdint>
#include <string>

#include "integrations/measure/verdict.h"

namespace ziggurat::measure {

/// Extents of [0, size_bytes) (FIEMAP; where the filesystem has none, holes alone by SEEK_HOLE).
ExtentFacts extent_facts(int fd, std::uint64_t size_bytes);

/// Errors: none; what cannot be learnt says so.
CacheFacts cache_facts(int fd, std::uint64_t size_bytes);

struct DriveFacts {
  std::string device;  ///< "/dev/nvme0n1p2"; empty: none that the kernel names
  std::string filesystem;
  std::string model;             ///< empty: the drive does not say
  std::uint64_t size_bytes = 0;  ///< of the filesystem (or raw device)
  std::uint64_t free_bytes = 0;
};
DriveFacts drive_facts(const std::string& path);

/// Bytes of an open file or block device. Errors: errno's, naming `path`.
std::uint64_t size_of(int fd, const std::string& path);

}  // namespace ziggurat::measure
