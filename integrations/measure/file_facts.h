// SPDX-License-Identifier: Apache-2.0
// integrations/measure/file_facts.h: what the kernel knows about an open file: its extents, how
// much of it is in the page cache, whether O_DIRECT is in force, and the drive below.
#pragma once

#include <cstdint>
#include <string>

#include "integrations/measure/verdict.h"

namespace ziggurat::measure {

/// Returns what is known of the extents of [0, size_bytes). It comes from FIEMAP; on a filesystem
/// without FIEMAP only holes are known, from SEEK_HOLE.
ExtentFacts extent_facts(int fd, std::uint64_t size_bytes);

/// Returns what is known of the file in the page cache. Throws nothing; what cannot be found out is
/// marked as unknown.
CacheFacts cache_facts(int fd, std::uint64_t size_bytes);

struct DriveFacts {
  std::string device;  ///< such as "/dev/nvme0n1p2"; empty if the kernel does not name it
  std::string filesystem;
  std::string model;             ///< empty if the drive does not tell it
  std::uint64_t size_bytes = 0;  ///< size of the filesystem (or raw device)
  std::uint64_t free_bytes = 0;
};
DriveFacts drive_facts(const std::string& path);

/// Returns the size of an open file or block device in bytes. Errors: system errors naming `path`.
std::uint64_t size_of(int fd, const std::string& path);

}  // namespace ziggurat::measure
