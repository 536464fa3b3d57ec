// SPDX-License-Identifier: Apache-2.0
// integrations/measure/file_facts.cc: asks the kernel by ioctls and mincore. Every answer may be
// "unknown".
#include "integrations/measure/file_facts.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/topology/limits.h"

namespace ziggurat::measure {
namespace {

constexpr std::size_t kExtentsAtOnce = 256;
constexpr std::uint64_t kWindowBytes = kGiB;  // mapped at once for mincore

struct FiemapBuffer {
  alignas(fiemap)
      std::array<std::byte, sizeof(fiemap) + kExtentsAtOnce * sizeof(fiemap_extent)> bytes{};
  fiemap& head() { return *reinterpret_cast<fiemap*>(bytes.data()); }
  fiemap_extent extent(std::size_t index) {
    fiemap_extent extent;
    std::memcpy(&extent, bytes.data() + sizeof(fiemap) + index * sizeof(extent), sizeof(extent));
    return extent;
  }
};

/// Adds up the extents by FIEMAP. Returns false if the filesystem does not have that call.
bool walk_extents(int fd, std::uint64_t size_bytes, ExtentFacts& facts) {
  std::uint64_t mapped = 0;
  std::uint64_t at = 0;
  FiemapBuffer buffer;
  for (bool last = false; !last && at < size_bytes;) {
    std::memset(&buffer.head(), 0, sizeof(fiemap));
    buffer.head().fm_start = at;
    buffer.head().fm_length = size_bytes - at;
    buffer.head().fm_flags = FIEMAP_FLAG_SYNC;
    buffer.head().fm_extent_count = kExtentsAtOnce;
    if (::ioctl(fd, FS_IOC_FIEMAP, &buffer.head()) != 0) return false;
    if (buffer.head().fm_mapped_extents == 0) break;
    for (std::size_t i = 0; i < buffer.head().fm_mapped_extents; ++i) {
      const fiemap_extent extent = buffer.extent(i);
      const std::uint64_t begin = std::max<std::uint64_t>(extent.fe_logical, at);
      const std::uint64_t end =
          std::min<std::uint64_t>(extent.fe_logical + extent.fe_length, size_bytes);
      const std::uint64_t length = end > begin ? end - begin : 0;
      mapped += length;
      if ((extent.fe_flags & FIEMAP_EXTENT_UNWRITTEN) != 0) facts.unwritten_bytes += length;
      if ((extent.fe_flags & FIEMAP_EXTENT_ENCODED) != 0) facts.encoded_bytes += length;
      at = std::max(at, end);
      last = (extent.fe_flags & FIEMAP_EXTENT_LAST) != 0;
    }
  }
  facts.hole_bytes = size_bytes - std::min(mapped, size_bytes);
  return true;
}

void walk_holes(int fd, std::uint64_t size_bytes, ExtentFacts& facts) {
  const auto size = static_cast<off_t>(size_bytes);
  for (off_t at = 0; at < size;) {
    const off_t data = ::lseek(fd, at, SEEK_DATA);
    if (data < 0 && errno != ENXIO) return;
    const off_t hole_end = data < 0 ? size : std::min(data, size);
    facts.hole_bytes += static_cast<std::uint64_t>(hole_end - at);
    facts.known = true;
    if (hole_end == size) return;
    at = ::lseek(fd, hole_end, SEEK_HOLE);
    if (at < 0) return;
  }
}

/// Returns whether mincore tells the truth about the file. For a user who neither owns the file nor
/// may write it, mincore calls every page resident (since Linux 5.2).
bool may_see_residency(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return false;
  return ::geteuid() == 0 || status.st_uid == ::geteuid() ||
         ::faccessat(fd, "", W_OK, AT_EMPTY_PATH | AT_EACCESS) == 0;
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  const auto end = line.find_last_not_of(" \t");
  return end == std::string::npos ? std::string() : line.substr(0, end + 1);
}

}  // namespace

ExtentFacts extent_facts(int fd, std::uint64_t size_bytes) {
  ExtentFacts facts;
  struct stat status {};
  if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) return facts;
  facts.known = walk_extents(fd, size_bytes, facts);
  if (facts.known) return facts;
  facts = {};
  walk_holes(fd, size_bytes, facts);
  return facts;
}

CacheFacts cache_facts(int fd, std::uint64_t size_bytes) {
  CacheFacts facts;
  facts.residency_known = may_see_residency(fd);
  const int flags = ::fcntl(fd, F_GETFL);
  facts.direct = flags >= 0 && (flags & O_DIRECT) != 0;
  if (!facts.residency_known) return facts;
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages;
  std::uint64_t resident = 0;
  for (std::uint64_t at = 0; at < size_bytes; at += kWindowBytes) {
    const std::uint64_t length = std::min(kWindowBytes, size_bytes - at);
    void* const window = ::mmap(nullptr, length, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(at));
    if (window == MAP_FAILED) {
      facts.residency_known = false;
      return facts;
    }
    pages.assign((length + page - 1) / page, 0);
    if (::mincore(window, length, pages.data()) != 0) facts.residency_known = false;
    ::munmap(window, length);
    resident += static_cast<std::uint64_t>(
        std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return (p & 1) != 0; }));
  }
  if (size_bytes > 0)
    facts.resident_share = static_cast<double>(resident * page) / static_cast<double>(size_bytes);
  return facts;
}

DriveFacts drive_facts(const std::string& path) {
  DriveFacts facts;
  struct stat status {};
  const bool raw = ::stat(path.c_str(), &status) == 0 && S_ISBLK(status.st_mode);
  if (raw) {
    facts.device = path;
    facts.filesystem = "none (raw device)";
  } else {
    const Filesystem filesystem = filesystem_of(path);
    facts.device = filesystem.source;
    facts.filesystem = filesystem.type;
    facts.size_bytes = filesystem.total_bytes;
    facts.free_bytes = filesystem.available_bytes;
  }
  const dev_t number = raw ? status.st_rdev : status.st_dev;
  const std::string folder = fmt::format("/sys/dev/block/{}:{}", ::major(number), ::minor(number));
  facts.model = first_line(folder + "/device/model");
  if (facts.model.empty()) facts.model = first_line(folder + "/../device/model");
  return facts;
}

std::uint64_t size_of(int fd, const std::string& path) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) throw system_error(errno, "cannot fstat " + path);
  if (!S_ISBLK(status.st_mode)) return static_cast<std::uint64_t>(status.st_size);
  std::uint64_t size = 0;
  if (::ioctl(fd, BLKGETSIZE64, &size) != 0)
    throw system_error(errno, "cannot get the size of " + path);
  return size;
}

}  // namespace ziggurat::measure
