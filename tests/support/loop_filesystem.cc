// SPDX-License-Identifier: Apache-2.0
// tests/support/loop_filesystem.cc: mkfs and mount(8), as an administrator would call them.
#include "tests/support/loop_filesystem.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

namespace ziggurat::test {

namespace fs = std::filesystem;

namespace {

/// Runs `command` and returns what it printed if it failed, "" if it did not.
std::string failure_of(const std::string& command, const fs::path& log) {
  const std::string line =
      fmt::format("PATH=$PATH:/usr/sbin:/sbin {} >'{}' 2>&1 </dev/null", command, log.string());
  if (std::system(line.c_str()) == 0) return "";
  std::ifstream file(log);
  std::string text((std::istreambuf_iterator<char>(file)), {});
  return fmt::format("{}: {}", command, text.empty() ? "failed" : text);
}

const char* mkfs(LoopFilesystem::Kind kind) {
  switch (kind) {
    case LoopFilesystem::Kind::kFillable: return "mkfs.ext4 -q -F -m 0 -O ^has_journal";
    case LoopFilesystem::Kind::kExt4: return "mkfs.ext4 -q -F";
    case LoopFilesystem::Kind::kXfs: break;
  }
  return "mkfs.xfs -q -f";
}

}  // namespace

LoopFilesystem::LoopFilesystem(std::uint64_t bytes, Kind kind) {
  std::string name = (fs::current_path() / "loop-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp " + name);
  folder_ = name;
  mount_point_ = folder_ / "mounted";
  fs::create_directory(mount_point_);
  if (::geteuid() != 0) {
    why_not_ = "mounting a filesystem needs root";
    return;
  }
  const fs::path image = folder_ / "image";
  std::ofstream(image).put('\0');
  fs::resize_file(image, bytes);
  why_not_ = failure_of(fmt::format("{} '{}'", mkfs(kind), image.string()), folder_ / "log");
  if (why_not_.empty()) why_not_ = share();
  if (why_not_.empty()) why_not_ = mount();
}

/// Lets what is mounted in the folder go away everywhere. A process with mounts of its own that
/// begins meanwhile (ip netns exec) would keep them, and a filesystem that was shut down would be
/// mounted again as it is.
std::string LoopFilesystem::share() {
  const std::string bind = fmt::format("mount --bind '{0}' '{0}'", folder_.string());
  if (const std::string failure = failure_of(bind, folder_ / "log"); !failure.empty())
    return failure;
  shared_ = true;
  return failure_of(fmt::format("mount --make-shared '{}'", folder_.string()), folder_ / "log");
}

std::string LoopFilesystem::mount() {
  const fs::path image = folder_ / "image";
  const std::string failure =
      failure_of(fmt::format("mount -o loop '{}' '{}'", image.string(), mount_point_.string()),
                 folder_ / "log");
  mounted_ = failure.empty();
  return failure;
}

std::string LoopFilesystem::unmount() {
  const std::string failure =
      failure_of(fmt::format("umount '{}'", mount_point_.string()), folder_ / "log");
  mounted_ = !failure.empty();
  return failure;
}

LoopFilesystem::~LoopFilesystem() {
  if (mounted_) {
    EXPECT_EQ(unmount(), "");
    if (mounted_) return;  // what is still mounted must not be removed
  }
  std::error_code ignored;
  if (shared_) {
    EXPECT_EQ(failure_of(fmt::format("umount '{}'", folder_.string()), "/dev/null"), "");
  }
  fs::remove_all(folder_, ignored);
}

std::uint64_t LoopFilesystem::free_bytes() const {
  struct statvfs about {};
  if (::statvfs(mount_point_.c_str(), &about) != 0) throw std::runtime_error("statvfs");
  return static_cast<std::uint64_t>(about.f_bavail) * about.f_frsize;
}

void LoopFilesystem::fill_up_to(std::uint64_t left) const {
  std::ofstream filler(mount_point_ / "filler", std::ios::binary | std::ios::app);
  for (const std::size_t size : {64 * 1024, 1024}) {
    const std::string block(size, 'x');
    filler.clear();
    while (free_bytes() >= left + size && filler.write(block.data(), block.size()).flush()) {
    }
  }
  EXPECT_LT(free_bytes(), left + 4096);
}

void LoopFilesystem::remount_read_only() const {
  ASSERT_EQ(
      failure_of(fmt::format("mount -o remount,ro '{}'", mount_point_.string()), folder_ / "log"),
      "");
}

void LoopFilesystem::sync() const {
  const int directory = ::open(mount_point_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  EXPECT_EQ(::syncfs(directory), 0);
  ::close(directory);
}

void LoopFilesystem::mount_again() {
  ASSERT_EQ(unmount(), "");
  ASSERT_EQ(mount(), "");
}

}  // namespace ziggurat::test
