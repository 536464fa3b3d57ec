// SPDX-License-Identifier: Apache-2.0
// tests/support/loop_filesystem.h: a small real filesystem of our own, to fill, to make read-only,
// to shut down, to take away.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace ziggurat::test {

/// An image file beside the tests, mounted through a loop device; unmounted and removed by the
/// destructor. Needs root, a free loop device and the filesystem's mkfs: without them `why_not()`
/// says what is missing and nothing is mounted.
class LoopFilesystem {
 public:
  enum class Kind : std::uint8_t {
    kFillable,  ///< ext4 without journal and reserved blocks: the size is what a test can fill
    kExt4,      ///< with its journal
    kXfs,       ///< of at least 300 MB
  };
  explicit LoopFilesystem(std::uint64_t bytes, Kind kind = Kind::kFillable);
  ~LoopFilesystem();
  LoopFilesystem(const LoopFilesystem&) = delete;
  LoopFilesystem& operator=(const LoopFilesystem&) = delete;

  /// Empty if it is mounted.
  const std::string& why_not() const noexcept { return why_not_; }
  const std::filesystem::path& path() const noexcept { return mount_point_; }
  std::string operator/(const std::string& name) const { return (mount_point_ / name).string(); }

  std::uint64_t free_bytes() const;
  /// Writes a file until `left` bytes are free, to within a block.
  void fill_up_to(std::uint64_t left) const;
  void remount_read_only() const;
  void sync() const;
  /// Unmounted and mounted again, as after a crash of the machine: the journal is replayed.
  void mount_again();

 private:
  /// All: what went wrong, or "".
  std::string share();
  std::string mount();
  std::string unmount();

  std::filesystem::path folder_;
  std::filesystem::path mount_point_;
  std::string why_not_;
  bool shared_ = false;
  bool mounted_ = false;
};

}  // namespace ziggurat::test
