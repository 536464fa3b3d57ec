// SPDX-License-Identifier: Apache-2.0
// base/topology/limits.cc: reads /proc and /sys.
#include "base/topology/limits.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <optional>
#include <span>
#include <sstream>
#include <string_view>
#include <vector>

#include "base/checksum.h"
#include "base/error.h"

namespace ziggurat {
namespace {

namespace fs = std::filesystem;

std::optional<std::string> first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return line;
}

std::optional<std::uint64_t> number_in(const fs::path& path) {
  const auto line = first_line(path);
  if (!line) return std::nullopt;
  std::uint64_t value = 0;
  const auto result = std::from_chars(line->data(), line->data() + line->size(), value);
  if (result.ec != std::errc{}) return std::nullopt;  // "max", among others
  return value;
}

struct Mount {
  std::string root;  // the part of the filesystem that is mounted
  std::string point;
  bool read_only = false;
  std::string type;
  std::string source;
  std::string super_options;
};

/// Undoes mountinfo's escapes: space, tab, newline and backslash as three octal digits.
std::string unescape(const std::string& text) {
  std::string plain;
  for (std::size_t i = 0; i < text.size(); ++i) {
    int code = 0;
    if (text[i] == '\\' && i + 3 < text.size() &&
        std::from_chars(&text[i + 1], &text[i + 4], code, 8).ptr == &text[i + 4]) {
      plain += static_cast<char>(code);
      i += 3;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

/// Reads mountinfo, whose lines look like "36 35 98:0 /root /point rw,noatime shared:1 - ext4
/// /dev/sda1 rw,errors=continue".
std::vector<Mount> read_mounts(const std::string& root) {
  std::vector<Mount> mounts;
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string id, parent, device, options, optional_field;
    Mount mount;
    fields >> id >> parent >> device >> mount.root >> mount.point >> options;
    while (fields >> optional_field && optional_field != "-") {
    }
    if (!(fields >> mount.type >> mount.source >> mount.super_options)) continue;
    mount.root = unescape(mount.root);
    mount.point = unescape(mount.point);
    mount.source = unescape(mount.source);
    mount.read_only = options == "ro" || options.starts_with("ro,");
    mounts.push_back(std::move(mount));
  }
  return mounts;
}

bool has_word(const std::string& list, const std::string& word) {
  std::istringstream words(list);
  for (std::string w; std::getline(words, w, ',');) {
    if (w == word) return true;
  }
  return false;
}

/// This process's group of a controller: of version 1 if that is mounted, else of the unified
/// hierarchy.
struct OwnGroup {
  int version = 0;
  std::string path;
};

OwnGroup own_group(const std::string& root, const std::string& controller) {
  OwnGroup unified;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // "4:memory:/path", "0::/path"
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (has_word(controllers, controller)) return {1, line.substr(second + 1)};
    if (controllers.empty()) unified = {2, line.substr(second + 1)};
  }
  return unified;
}

/// Returns a group's folder. Inside a container the mount shows a subtree, so the mounted root is
/// removed from the group's path if the path begins with it.
fs::path folder_of(const OwnGroup& group, const Mount& mount) {
  std::string relative = group.path;
  if (relative.starts_with("/..")) relative = "/";  // the path leads above the namespace's root
  if (mount.root != "/" && (relative + "/").starts_with(mount.root + "/"))
    relative.erase(0, mount.root.size());
  while (relative.starts_with("/")) relative.erase(0, 1);
  return relative.empty() ? fs::path(mount.point) : fs::path(mount.point) / relative;
}

/// Returns the folders of this process's group and its parents, from the inside out. Empty if no
/// mount shows them.
std::vector<fs::path> folders_of(const OwnGroup& group, const std::string& controller,
                                 const std::string& root) {
  const auto mounts = read_mounts(root);
  const auto mount = std::find_if(mounts.begin(), mounts.end(), [&](const Mount& m) {
    return group.version == 1 ? m.type == "cgroup" && has_word(m.super_options, controller)
                              : group.version == 2 && m.type == "cgroup2";
  });
  std::vector<fs::path> folders;
  if (mount == mounts.end()) return folders;
  for (fs::path folder = folder_of(group, *mount);; folder = folder.parent_path()) {
    folders.push_back(folder);
    if (folder == mount->point || folder == folder.parent_path()) return folders;
  }
}

/// Returns the number that `file` has behind `name`, or 0. Lines look like "MemFree:  1768 kB" or
/// "inactive_file 4096".
std::uint64_t named_number(const fs::path& file, std::string_view name) {
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    std::string its;
    std::uint64_t value = 0;
    if (fields >> its >> value && its == name) return value;
  }
  return 0;
}

/// Returns what is left of the limits of the group whose folder this is; kUnlimited without any.
std::uint64_t left_in_group(int version, const fs::path& folder) {
  // Version 2 slows processes down at memory.high, before the limit.
  const std::vector<const char*> limits = version == 1 ? std::vector{"memory.limit_in_bytes"}
                                                       : std::vector{"memory.max", "memory.high"};
  std::uint64_t limit_bytes = kUnlimited;
  for (const char* const name : limits)
    limit_bytes = std::min(limit_bytes, number_in(folder / name).value_or(kUnlimited));
  if (limit_bytes == kUnlimited) return kUnlimited;
  const char* const usage = version == 1 ? "memory.usage_in_bytes" : "memory.current";
  const std::string prefix = version == 1 ? "total_" : "";
  std::uint64_t given_up_bytes = 0;
  for (const char* const pages : {"inactive_file", "active_file"})
    given_up_bytes += named_number(folder / "memory.stat", prefix + pages);
  const std::uint64_t used_bytes = number_in(folder / usage).value_or(0);
  const std::uint64_t kept_bytes = used_bytes - std::min(used_bytes, given_up_bytes);
  return limit_bytes - std::min(limit_bytes, kept_bytes);
}

/// Returns how many CPUs one group may use: time per period. The files have "max 100000", or two
/// files have -1 for no limit.
std::optional<double> cpu_quota(int version, const std::string& folder) {
  std::string quota, period;
  if (version == 2) {
    std::istringstream(first_line(folder + "/cpu.max").value_or("")) >> quota >> period;
  } else {
    quota = first_line(folder + "/cpu.cfs_quota_us").value_or("");
    period = first_line(folder + "/cpu.cfs_period_us").value_or("");
  }
  const auto number = [](const std::string& text) {
    std::uint64_t value = 0;
    std::from_chars(text.data(), text.data() + text.size(), value);
    return static_cast<double>(value);  // 0 for "max", "-1" and a missing file
  };
  if (number(quota) == 0 || number(period) == 0) return std::nullopt;
  return number(quota) / number(period);
}

}  // namespace

std::uint64_t memlock_limit_bytes() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0)
    throw system_error(errno, "getrlimit(RLIMIT_MEMLOCK)");
  return limit.rlim_cur == RLIM_INFINITY ? kUnlimited : limit.rlim_cur;
}

CgroupMemory cgroup_memory(const std::string& root) {
  const OwnGroup group = own_group(root, "memory");
  const std::vector<fs::path> folders = folders_of(group, "memory", root);
  if (folders.empty()) return {};
  const char* limit_file = group.version == 1 ? "memory.limit_in_bytes" : "memory.max";
  const char* usage_file = group.version == 1 ? "memory.usage_in_bytes" : "memory.current";

  const auto usage = [&](const fs::path& folder) {
    return number_in(root + (folder / usage_file).string()).value_or(0);
  };
  CgroupMemory memory{.version = group.version, .path = folders.front().string()};
  memory.usage_bytes = usage(folders.front());
  for (const fs::path& folder : folders) {
    const auto limit = number_in(root + (folder / limit_file).string());
    // In version 1, "no limit" is the largest multiple of the page size.
    if (limit && *limit < (std::uint64_t{1} << 62) && *limit < memory.limit_bytes) {
      memory.limit_bytes = *limit;
      memory.path = folder.string();
      memory.usage_bytes = usage(folder);
    }
  }
  return memory;
}

std::uint64_t free_memory_bytes(const std::string& root) {
  std::uint64_t free_bytes = 1024 * named_number(root + "/proc/meminfo", "MemAvailable:");
  const OwnGroup group = own_group(root, "memory");
  for (const fs::path& folder : folders_of(group, "memory", root))
    free_bytes = std::min(free_bytes, left_in_group(group.version, root + folder.string()));
  return free_bytes;
}

double cgroup_cpus(const std::string& root) {
  const OwnGroup group = own_group(root, "cpu");
  double least = std::numeric_limits<double>::infinity();
  for (const fs::path& folder : folders_of(group, "cpu", root))
    least = std::min(least, cpu_quota(group.version, root + folder.string()).value_or(least));
  return least;
}

HugePages huge_pages(const std::string& root) {
  const std::string pool = root + "/sys/kernel/mm/hugepages/hugepages-2048kB/";
  HugePages pages;
  pages.reserved = number_in(pool + "nr_hugepages").value_or(0);
  pages.free = number_in(pool + "free_hugepages").value_or(0);
  if (const auto modes = first_line(root + "/sys/kernel/mm/transparent_hugepage/enabled")) {
    const auto open = modes->find('[');  // "always [madvise] never"
    const auto close = modes->find(']');
    if (open != std::string::npos && close != std::string::npos && open < close) {
      pages.transparent = modes->substr(open + 1, close - open - 1);
    }
  }
  return pages;
}

int io_uring_disabled(const std::string& root) {
  const auto value = number_in(root + "/proc/sys/kernel/io_uring_disabled");
  return value ? static_cast<int>(*value) : -1;
}

std::uint64_t machine_number(const std::string& root) {
  std::ifstream file(root + "/proc/sys/kernel/random/boot_id");
  std::string id;
  if (!std::getline(file, id) || id.empty()) {
    utsname name{};
    if (::uname(&name) != 0) throw system_error(errno, "uname");
    id = name.nodename;
  }
  return hash64(std::as_bytes(std::span(id)), 0);
}

std::string kernel_release() {
  utsname name{};
  if (::uname(&name) != 0) throw system_error(errno, "uname");
  return name.release;
}

std::string nearest_existing(const std::string& path) {
  std::error_code error;
  for (fs::path p = path; !p.empty(); p = p.parent_path()) {
    if (fs::exists(p, error)) return p.string();
    if (p == p.parent_path()) break;
  }
  return fs::path(path).is_absolute() ? "/" : ".";
}

Filesystem filesystem_of(const std::string& path, const std::string& root) {
  const std::string existing = nearest_existing(path);
  struct statvfs info {};
  if (::statvfs(existing.c_str(), &info) != 0) throw system_error(errno, "statvfs " + existing);
  Filesystem result;
  result.read_only = (info.f_flag & ST_RDONLY) != 0;
  result.total_bytes = info.f_blocks * info.f_frsize;
  result.available_bytes = info.f_bavail * info.f_frsize;

  std::error_code error;
  const std::string real = fs::canonical(existing, error).string();
  for (const Mount& mount : read_mounts(root)) {
    const std::string prefix = mount.point == "/" ? "/" : mount.point + "/";
    if (real != mount.point && !real.starts_with(prefix)) continue;
    if (mount.point.size() < result.mount_point.size())
      continue;  // of two equal mounts, the later one covers the earlier
    result.mount_point = mount.point;
    result.type = mount.type;
    result.source = mount.source;
  }
  return result;
}

}  // namespace ziggurat
