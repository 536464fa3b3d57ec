// SPDX-License-Identifier: Apache-2.0
// base/topology/block_device.cc: walks sysfs, because hwloc knows PCI devices, but not what is
// stacked on them.
#include "base/topology/block_device.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

#include "base/topology/limits.h"

namespace ziggurat::internal {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxStacking = 16;  // dm on md on dm and so on; the kernel itself allows 8 levels

/// Returns whether `name` is a PCI address: dddd:bb:dd.f, where the domain may be longer (VMD).
bool is_pci_address(const std::string& name) {
  const auto dot = name.rfind('.');
  if (name.size() < 12 || dot != name.size() - 2) return false;
  if (name[dot - 3] != ':' || name[dot - 6] != ':') return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    return c == ':' || c == '.' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
  });
}

/// Returns the last PCI address in a sysfs path. It is the device itself; earlier ones are bridges.
std::string last_pci_address(const fs::path& path) {
  std::string found;
  for (const fs::path& part : path) {
    if (is_pci_address(part.string())) found = part.string();
  }
  return found;
}

void collect(const std::string& root, const fs::path& device, int depth,
             std::set<std::string>& found);

/// Follows those entries of `directory` that begin with `prefix`; they are links to devices.
void collect_entries(const std::string& root, const fs::path& directory, const std::string& prefix,
                     int depth, std::set<std::string>& found) {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, error)) {
    if (!entry.path().filename().string().starts_with(prefix)) continue;
    const fs::path target = fs::canonical(entry.path(), error);
    if (!error) collect(root, target, depth + 1, found);
  }
}

/// Adds the PCI addresses under `device` to `found`. `device` is the canonical sysfs folder of a
/// block device or a controller.
void collect(const std::string& root, const fs::path& device, int depth,
             std::set<std::string>& found) {
  if (depth > kMaxStacking) return;
  std::error_code error;
  if (const std::string address = last_pci_address(device); !address.empty()) {
    found.insert(address);
    return;
  }
  if (fs::exists(device / "partition", error)) {  // a partition of a device that is itself stacked
    collect(root, device.parent_path(), depth + 1, found);
    return;
  }
  collect_entries(root, device / "slaves", "", depth, found);
  if (device.parent_path().filename().string().starts_with(
          "nvme-subsys")) {  // multipath: one head with many controllers
    collect_entries(root, device.parent_path(), "nvme", depth, found);
  }
  std::ifstream backing(device / "loop" / "backing_file");
  if (std::string file; std::getline(backing, file)) {
    for (const std::string& address :
         pci_addresses_of_device(root, block_device_of_path(root, file))) {
      found.insert(address);
    }
  }
}

}  // namespace

std::vector<std::string> pci_addresses_of_device(const std::string& root, dev_t device) {
  if (device == 0) return {};
  std::error_code error;
  const fs::path link = fmt::format("{}/sys/dev/block/{}:{}", root, major(device), minor(device));
  const fs::path target = fs::canonical(link, error);
  if (error) return {};
  std::set<std::string> found;
  collect(root, target, 0, found);
  return {found.begin(), found.end()};
}

dev_t block_device_of_path(const std::string& root, const std::string& path) {
  struct stat info {};
  if (::stat(nearest_existing(path).c_str(), &info) != 0) return 0;
  if (S_ISBLK(info.st_mode)) return info.st_rdev;
  if (major(info.st_dev) != 0) return info.st_dev;
  const std::string source = filesystem_of(path, root).source;
  if (source.starts_with("/dev/") && ::stat(source.c_str(), &info) == 0 && S_ISBLK(info.st_mode)) {
    return info.st_rdev;
  }
  return 0;
}

}  // namespace ziggurat::internal
