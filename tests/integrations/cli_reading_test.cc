// SPDX-License-Identifier: Apache-2.0
// tests/integrations/cli_reading_test.cc: what only reads needs a file that it may read, and
// nothing else: no leave to write there or in the working directory, no O_DIRECT.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "tests/integrations/cli_process.h"

namespace ziggurat::test {
namespace cli_reading_test {

namespace fs = std::filesystem;

/// A filesystem in memory, at `path` until its end. Needs root: else `why_not()` says so.
class MemoryFilesystem {
 public:
  MemoryFilesystem(fs::path path, const char* type) : path_(std::move(path)) {
    fs::create_directory(path_);
    mounted_ = ::mount("none", path_.c_str(), type, 0, nullptr) == 0;
    if (!mounted_) why_not_ = std::string("mounting a filesystem: ") + std::strerror(errno);
  }
  ~MemoryFilesystem() {
    if (mounted_) {
      EXPECT_EQ(::umount2(path_.c_str(), MNT_DETACH), 0);
    }
  }
  MemoryFilesystem(const MemoryFilesystem&) = delete;
  MemoryFilesystem& operator=(const MemoryFilesystem&) = delete;

  const std::string& why_not() const noexcept { return why_not_; }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  const fs::path& path() const noexcept { return path_; }
  bool make_read_only() const {
    constexpr unsigned long kReadOnly = MS_REMOUNT | MS_BIND | MS_RDONLY;
    return ::mount(nullptr, path_.c_str(), nullptr, kReadOnly, nullptr) == 0;
  }

 private:
  fs::path path_;
  bool mounted_ = false;
  std::string why_not_;
};

/// ramfs refuses O_DIRECT.
class CliReading : public ::testing::TestWithParam<const char*> {
 protected:
  ~CliReading() override { fs::current_path(before_); }

  const fs::path before_ = fs::current_path();
  TemporaryFolder folder_;
};

TEST_P(CliReading, NeedsNoLeaveToWriteWhereItReadsOrWorks) {
  const MemoryFilesystem there(folder_.path() / "there", GetParam());
  if (!there.why_not().empty()) GTEST_SKIP() << there.why_not();
  const Arguments saves{"--checkpoint-dir", folder_ / "saved"};
  const Output run = ziggurat(folder_.path(), tiny_train(folder_, "store", 2) + saves);
  ASSERT_EQ(run.exit_code, 0) << run.err;
  for (const char* name : {"store", "saved"})
    fs::copy(folder_ / name, there / name, fs::copy_options::recursive);
  ASSERT_TRUE(there.make_read_only()) << std::strerror(errno);
  ASSERT_NE(::access(there.path().c_str(), W_OK), 0);
  fs::current_path(there.path());
  const std::string saved = there / "saved/step-000000002";
  const std::string store = there / "store";
  const auto expect_done = [&](const Arguments& arguments) {
    const Output output = ziggurat(folder_.path(), arguments);
    EXPECT_EQ(output.exit_code, 0)
        << arguments.at(0) << " " << arguments.at(1) << ": " << output.err;
    return output;
  };
  for (const std::string& from : {saved, there / "saved", store}) {
    expect_done({"ckpt", "inspect", from});
    expect_done({"ckpt", "verify", from});
    expect_done({"ckpt", "diff", from, saved});
    expect_done({"ckpt", "to-hf", from, folder_ / "hf", "--force"});
    expect_done({"export", "--store", from, "--to", folder_ / "out", "--force"});
    expect_done({"sample", "--store", from, "--prompt", "and the", "--bytes", "3"});
  }
  expect_done({"ckpt", "save", store, folder_ / "copies"});
  expect_done(tiny_train(folder_, "loaded", 3) + Arguments{"--load", saved});
}

INSTANTIATE_TEST_SUITE_P(Filesystems, CliReading, ::testing::Values("tmpfs", "ramfs"),
                         [](const auto& its) { return std::string(its.param); });

}  // namespace cli_reading_test
}  // namespace ziggurat::test
