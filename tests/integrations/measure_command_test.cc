// SPDX-License-Identifier: Apache-2.0
// tests/integrations/measure_command_test.cc: `ziggurat bench io` and `ziggurat profile` as a user
// meets them: the rows, the files, the five ways to flatter a drive, and what is never touched.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <string>
#include <string_view>

#include "core/plan/machine_profile.h"
#include "integrations/measure/result.h"
#include "tests/integrations/cli_process.h"

namespace ziggurat::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

constexpr std::size_t kMiB = 1 << 20;

/// Small and short: the figures mean nothing, the rest does.
Arguments quick(const TemporaryFolder& folder) {
  return {"bench",    "io",     "--seconds",        "0.1", "--profile", folder / "profile.json",
          "--no-fio", "--json", folder / "out.json"};
}

json result(const TemporaryFolder& folder) {
  return json::parse(contents(folder.path() / "out.json"));
}

std::vector<std::string> doubts(const json& row) {
  std::vector<std::string> all;
  for (const json& flag : row.at("flags")) all.push_back(flag.at("doubt"));
  return all;
}

/// Nothing but what the test itself made.
std::size_t files_in(const fs::path& folder) {
  return static_cast<std::size_t>(
      std::distance(fs::recursive_directory_iterator(folder), fs::recursive_directory_iterator()));
}

/// Written in full and out of the cache, of random bytes unless `zeros`.
void make_file(const std::string& path, std::size_t size_bytes, bool zeros = false) {
  std::mt19937_64 random(1);
  std::vector<std::uint64_t> block(kMiB / 8);
  const int fd = ::open(path.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
  ASSERT_GE(fd, 0);
  for (std::size_t at = 0; at < size_bytes; at += kMiB) {
    if (!zeros) {
      for (std::uint64_t& word : block) word = random();
    }
    ASSERT_EQ(::write(fd, block.data(), kMiB), static_cast<ssize_t>(kMiB));
  }
  ASSERT_EQ(::fsync(fd), 0);
  ASSERT_EQ(::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
  ::close(fd);
}

bool folder_allows_direct_io(const TemporaryFolder& folder) {
  const int fd = ::open((folder / "direct").c_str(), O_CREAT | O_RDWR | O_DIRECT, 0600);
  if (fd >= 0) ::close(fd);
  fs::remove(folder / "direct");
  return fd >= 0;
}

TEST(BenchCommand, MeasuresEveryRowLeavesNoFileAndWritesAProfile) {
  const TemporaryFolder folder;
  fs::create_directory(folder.path() / "drive");
  const auto begun = std::chrono::steady_clock::now();
  const Output output =
      ziggurat(folder.path(), quick(folder) + Arguments{"--path", folder / "drive", "--size",
                                                        "32MiB", "--report", folder / "page.html"});
  const std::chrono::duration<double> whole = std::chrono::steady_clock::now() - begun;
  ASSERT_EQ(output.exit_code, 0) << output.out << output.err;
  EXPECT_THAT(output.out, HasSubstr("will write about"));
  EXPECT_EQ(files_in(folder.path() / "drive"), 0U);

  const json object = result(folder);
  const json& rows = object.at("sets").at(0).at("rows");
  ASSERT_EQ(rows.size(), measure::kWorkloads);
  for (const json& row : rows) {
    const std::string name = row.at("workload");
    EXPECT_THAT(output.out, HasSubstr(row.at("title").get<std::string>()));
    const json& round = row.at("rounds").at(0);
    EXPECT_GT(row.at("gb_per_s").get<double>(), 0) << name;
    EXPECT_GT(round.at("latency").at("count").get<int>(), 0) << name;
    EXPECT_TRUE(round.at("verified").get<bool>()) << name;
    EXPECT_GT(round.at("checked_pages").get<int>(), 0) << name;
    EXPECT_EQ(round.at("wrong_pages").get<int>(), 0) << name;
    EXPECT_EQ(round.contains("deadlines"), name.rfind("prefetch", 0) == 0) << name;
    EXPECT_EQ(round.contains("adam_beside_gb_per_s"), name.find("beside") != std::string::npos)
        << name;
  }
  EXPECT_GT(object.at("adam_alone_gb_per_s").get<double>(), 0);
  EXPECT_GT(object.at("wall_s").get<double>(), 0);
  EXPECT_LE(object.at("wall_s").get<double>(), whole.count()) << "it is within the command's own";

  const std::optional<MachineProfile> profile = read_profile(folder / "profile.json");
  ASSERT_TRUE(profile);
  ASSERT_EQ(profile->drives.size(), 1U);
  EXPECT_GT(profile->drives[0].sweep_gb_per_s, 0);
  EXPECT_THAT(profile->drives[0].flags, Contains("short"));
  const Output shown = ziggurat(
      folder.path(), {"profile", "--file", folder / "profile.json", "--path", folder / "drive"});
  EXPECT_EQ(shown.exit_code, 0) << shown.err;
  EXPECT_THAT(shown.out, HasSubstr("sweep"));

  // XML's own judge, where there is one.
  const std::string check =
      "python3 -c 'import sys, xml.etree.ElementTree as e; e.parse(sys.argv[1])' " +
      (folder / "page.html");
  EXPECT_EQ(std::system(check.c_str()), 0);
}

TEST(BenchCommand, AOneSecondRunIsFlagged) {
  const TemporaryFolder folder;
  fs::create_directory(folder.path() / "drive");
  Arguments arguments =
      quick(folder) + Arguments{"--path", folder / "drive", "--size", "16MiB", "--depth", "4"};
  arguments[3] = "1";
  ASSERT_EQ(ziggurat(folder.path(), arguments).exit_code, 0);
  const json whole = result(folder);
  for (const json& row : whole.at("sets").at(0).at("rows")) {
    EXPECT_THAT(doubts(row), Contains("short"));
    EXPECT_THAT(doubts(row), Contains("small"));
  }
}

class BenchOfAFile : public testing::Test {
 protected:
  void SetUp() override {
    if (!folder_allows_direct_io(folder)) GTEST_SKIP() << "no O_DIRECT in the build's filesystem";
  }

  /// Runs on `file` and returns each row's doubts, which are the same in all of them.
  std::vector<std::string> verdict(int exit_code) {
    const auto before = fs::last_write_time(file);
    const Output output = ziggurat(folder.path(), quick(folder) + Arguments{"--file", file});
    EXPECT_EQ(output.exit_code, exit_code) << output.out << output.err;
    EXPECT_EQ(fs::last_write_time(file), before) << "somebody's file was written";
    EXPECT_EQ(fs::exists(folder.path() / "profile.json"), exit_code == 0);
    std::vector<std::string> all;
    const json object = result(folder);
    EXPECT_EQ(object.at("sets").at(0).at("rows").size(), 4U) << "reading rows only";
    for (const json& row : object.at("sets").at(0).at("rows")) {
      all = doubts(row);
      EXPECT_EQ(row.at("refused").get<bool>(), exit_code != 0);
      EXPECT_EQ(output.out.find("refused") != std::string::npos, exit_code != 0);
    }
    return all;
  }

  const TemporaryFolder folder;
  const std::string file = folder / "file";
};

TEST_F(BenchOfAFile, RealDataIsMeasured) {
  make_file(file, 24 * kMiB);
  const std::vector<std::string> all = verdict(0);
  for (const char* refusal : {"hole", "unwritten", "cached", "zeros", "compressible"})
    EXPECT_THAT(all, Not(Contains(refusal)));
}

TEST_F(BenchOfAFile, AHoleIsRefused) {
  make_file(file, 8 * kMiB);
  ASSERT_EQ(::truncate(file.c_str(), 24 * kMiB), 0);
  EXPECT_THAT(verdict(1), Contains("hole"));
}

TEST_F(BenchOfAFile, AFileThatWasNeverWrittenIsRefused) {
  const int fd = ::open(file.c_str(), O_CREAT | O_WRONLY, 0600);
  const int result = ::fallocate(fd, 0, 0, 24 * kMiB);
  ::close(fd);
  if (result != 0) GTEST_SKIP() << "no fallocate in the build's filesystem";
  EXPECT_THAT(verdict(1), Contains("unwritten"));
}

TEST_F(BenchOfAFile, AWarmCacheIsRefused) {
  make_file(file, 24 * kMiB);
  ASSERT_EQ(contents(file).size(), 24 * kMiB);  // now it is in the page cache
  EXPECT_THAT(verdict(1), Contains("cached"));
}

TEST_F(BenchOfAFile, ZerosAreRefused) {
  make_file(file, 24 * kMiB, true);
  EXPECT_THAT(verdict(1), Contains("zeros"));
}

TEST(BenchCommand, TuningPrintsAFragmentThatLoads) {
  const TemporaryFolder folder;
  fs::create_directory(folder.path() / "drive");
  const Output output = ziggurat(
      folder.path(), quick(folder) + Arguments{"--path", folder / "drive", "--size", "16MiB",
                                               "--tune", "--tune-seconds", "1", "--model", "7B"});
  ASSERT_EQ(output.exit_code, 0) << output.out << output.err;
  const std::size_t begin = output.out.find("\n{\n");
  const std::size_t end = output.out.find("\n}\n");
  ASSERT_NE(begin, std::string::npos) << output.out;
  const MachineProfile fragment =
      parse_profile(output.out.substr(begin + 1, end + 2 - begin), "printed");
  ASSERT_TRUE(fragment.aio);
  EXPECT_EQ(fragment.aio->block_size, fragment.drives.at(0).block_bytes);
  std::set<int> blocks;
  const json whole = result(folder);
  for (const json& cell : whole.at("sets").at(0).at("tune").at("cells")) {
    blocks.insert(cell.at("block_bytes").get<int>());
    EXPECT_LE(cell.at("block_bytes").get<int>() * cell.at("queue_depth").get<int>(), 64 << 20);
  }
  EXPECT_THAT(blocks, ElementsAre(256 << 10, 1 << 20, 2 << 20, 4 << 20));
}

TEST(BenchCommand, TwoPathsAreMeasuredAloneAndTogether) {
  const TemporaryFolder folder;
  fs::create_directory(folder.path() / "a");
  fs::create_directory(folder.path() / "b");
  const Output output = ziggurat(
      folder.path(), quick(folder) + Arguments{"--path", folder / "a", "--path", folder / "b",
                                               "--size", "16MiB", "--depth", "4"});
  ASSERT_EQ(output.exit_code, 0) << output.out << output.err;
  const json object = result(folder);
  ASSERT_EQ(object.at("sets").size(), 3U);
  EXPECT_EQ(object.at("sets").at(2).at("paths").size(), 2U);
  for (const json& set : object.at("sets")) EXPECT_EQ(set.at("rows").size(), measure::kWorkloads);
}

TEST(BenchCommand, FioRunsOnTheSameFileWhereItIsInstalled) {
  if (std::system("fio --version >/dev/null 2>&1") != 0) GTEST_SKIP() << "fio is not installed";
  const TemporaryFolder folder;
  fs::create_directory(folder.path() / "drive");
  Arguments arguments =
      quick(folder) + Arguments{"--path", folder / "drive", "--size",  "32MiB", "--rounds",
                                "2",      "--rows",         "read,mix"};
  std::erase(arguments, "--no-fio");
  const Output output = ziggurat(folder.path(), arguments);
  ASSERT_EQ(output.exit_code, 0) << output.out << output.err;
  const json object = result(folder);
  const json& set = object.at("sets").at(0);
  if (set.at("fio").get<std::string>().rfind("not run", 0) == 0)
    GTEST_SKIP() << set.at("fio").get<std::string>();
  for (const json& row : set.at("rows")) {
    for (const json& round : row.at("rounds")) {
      EXPECT_EQ(round.at("wrong_pages").get<int>(), 0) << "fio's writes were not told from ours";
    }
    const std::string name = row.at("workload");
    EXPECT_EQ(row.at("fio_rounds").size(), 2U) << name;
    EXPECT_GT(row.at("fio_ratio").get<double>(), 0) << name;
  }
  EXPECT_EQ(files_in(folder.path() / "drive"), 0U);
}

TEST(BenchCommand, CtrlCLeavesNothingAndExitsWith130) {
  for (const int number : {SIGINT, SIGTERM}) {
    const TemporaryFolder folder;
    fs::create_directory(folder.path() / "drive");
    Arguments arguments = quick(folder) + Arguments{"--path", folder / "drive", "--size", "32MiB"};
    arguments[3] = "60";
    Process process(folder.path(), arguments);
    ASSERT_TRUE(process.wait_for_output("read: "));
    process.signal(number);
    const Output output = process.wait();
    EXPECT_EQ(output.exit_code, 130) << output.err;
    EXPECT_EQ(files_in(folder.path() / "drive"), 0U);
    EXPECT_FALSE(fs::exists(folder.path() / "profile.json"));
    EXPECT_FALSE(fs::exists(folder.path() / "out.json"));
  }
}

TEST(BenchCommand, WorksOnThreadsWithTheirOwnDepth) {
  const TemporaryFolder folder;
  fs::create_directory(folder.path() / "drive");
  const Arguments arguments =
      quick(folder) + Arguments{"--path", folder / "drive", "--size", "16MiB"};
  const Environment threads{{"ZIGGURAT_IO", "threads"}};
  ASSERT_EQ(ziggurat(folder.path(), arguments, threads).exit_code, 0);
  const json set = result(folder).at("sets").at(0);
  EXPECT_THAT(set.at("engines").at(0).get<std::string>(), HasSubstr("threads"));
  EXPECT_LE(set.at("queue_depth").at("read").get<int>(), 4);
  const Output deeper = ziggurat(folder.path(), arguments + Arguments{"--depth", "16"}, threads);
  EXPECT_EQ(deeper.exit_code, 1);
  EXPECT_THAT(deeper.err, HasSubstr("at most 4 transfers"));
}

TEST(BenchCommand, MeasuresOnlyTheRowsThatAreWantedAndLeavesTheProfileAlone) {
  const TemporaryFolder folder;
  fs::create_directory(folder.path() / "drive");
  const Output output =
      ziggurat(folder.path(), quick(folder) + Arguments{"--path", folder / "drive", "--size",
                                                        "16MiB", "--rows", "mix,read"});
  ASSERT_EQ(output.exit_code, 0) << output.err;
  std::vector<std::string> rows;
  const json whole = result(folder);
  for (const json& row : whole.at("sets").at(0).at("rows"))
    rows.push_back(row.at("workload").get<std::string>());
  EXPECT_THAT(rows, ::testing::ElementsAre("read", "mix"));
  EXPECT_FALSE(fs::exists(folder.path() / "profile.json"));
}

TEST(BenchCommand, WhatItMayNotDoItSaysInOneLine) {
  const TemporaryFolder folder;
  write_file(folder / "small", "too small");
  write_file(folder / "bad.json", "{\"ziggurat_profile\": 9}");
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  const struct {
    Arguments arguments;
    int exit_code;
    const char* says;
  } cases[] = {
      {{"bench"}, 2, "io"},
      {{"bench", "io", "--bloc", "1"}, 2, "did you mean --block"},
      {{"bench", "io", "--seconds", "0"}, 2, "--seconds 0"},
      {{"bench", "io", "--size", "1KiB"}, 2, "--size 1KiB"},
      {{"bench", "io", "--block", "5000"}, 2, "--block 5000"},
      {{"bench", "io", "--rows", "read,wrote"}, 2, "\"wrote\" is not a row"},
      {{"bench", "io", "--rows", "prefetch"}, 2, "add read"},
      {{"bench", "io", "--block", "8MiB"}, 2, "--block 8MiB"},
      {{"bench", "io", "--model", "large"}, 2, "--model large"},
      {{"bench", "io", "--model", "3"}, 2, "--model 3"},
      {{"bench", "io", "--path", ".", "--file", "x"}, 2, "not both"},
      {{"bench", "io", "--path", folder / "nowhere"}, 1, "ENOENT"},
      {{"bench", "io", "--path", folder / "small"}, 1, "is not a folder"},
      {{"bench", "io", "--path", ".", "--size", "1000000GiB"}, 1, "does not fit"},
      {{"bench", "io", "--path", ".", "--json", folder / "no/such"}, 1, "no/such"},
      {{"bench", "io", "--file", folder / "small"}, 1, "too few"},
      {{"bench", "io", "--file", folder / "pipe"}, 1, "neither a regular file"},
      {{"bench", "io", "--path", ".", "--profile", folder / "bad.json"}, 1, "version 9"},
      {{"profile", "--file", folder / "none.json"}, 1, "bench io"},
      {{"profile", "--file", folder / "bad.json"}, 1, "version 9"},
  };
  for (const auto& [arguments, exit_code, says] : cases) {
    SCOPED_TRACE(says);
    const Output output = ziggurat(folder.path(), arguments,
                                   {{"XDG_CONFIG_HOME", folder.path().string() + "/config"}});
    EXPECT_EQ(output.exit_code, exit_code) << output.out;
    EXPECT_THAT(output.err, HasSubstr(says));
  }
}

TEST(BenchCommand, ARawDeviceIsRefused) {
  std::string device;
  for (const auto& entry : fs::directory_iterator("/dev")) {
    std::error_code ignored;
    if (fs::is_block_file(entry.path(), ignored)) device = entry.path().string();
  }
  if (device.empty()) GTEST_SKIP() << "no block device in /dev";
  const TemporaryFolder folder;
  const Output read = ziggurat(folder.path(), quick(folder) + Arguments{"--file", device});
  EXPECT_EQ(read.exit_code, 1);
  EXPECT_THAT(read.err, HasSubstr("--allow-raw-device"));
  const Output written =
      ziggurat(folder.path(), quick(folder) + Arguments{"--path", device, "--allow-raw-device"});
  EXPECT_EQ(written.exit_code, 1);
  EXPECT_THAT(written.err, HasSubstr("the benchmark never writes"));
}

/// A loop device over `image`, for reading; empty where there is none to be had.
class LoopDevice {
 public:
  explicit LoopDevice(const std::string& image) {
    std::FILE* const made =
        ::popen(("losetup --read-only --find --show " + image + " 2>/dev/null").c_str(), "r");
    std::array<char, 64> line{};
    if (made != nullptr && std::fgets(line.data(), line.size(), made) != nullptr)
      path_.assign(line.data(), std::string_view(line.data()).find('\n'));
    if (made != nullptr) ::pclose(made);
  }
  ~LoopDevice() {
    if (!path_.empty()) static_cast<void>(std::system(("losetup --detach " + path_).c_str()));
  }
  LoopDevice(const LoopDevice&) = delete;
  LoopDevice& operator=(const LoopDevice&) = delete;
  const std::string& path() const noexcept { return path_; }

 private:
  std::string path_;
};

TEST(BenchCommand, ARawDeviceIsReadWhereThatIsAllowed) {
  const TemporaryFolder folder;
  const std::string image = folder / "image";
  std::string content(32 << 20, '\0');
  std::mt19937_64 random(1);
  for (char& c : content) c = static_cast<char>(random());
  std::ofstream(image, std::ios::binary) << content;
  const LoopDevice device(image);
  if (device.path().empty()) GTEST_SKIP() << "no loop device to be had: it takes root";
  const Output output = ziggurat(
      folder.path(),
      quick(folder) + Arguments{"--file", device.path(), "--rows", "read", "--allow-raw-device"});
  EXPECT_EQ(output.exit_code, 0) << output.err;
  EXPECT_TRUE(contents(image) == content) << "it was written to";
}

TEST(BenchCommand, HelpNamesEveryFlag) {
  const TemporaryFolder folder;
  const Output output = ziggurat(folder.path(), {"bench", "io", "--help"});
  EXPECT_EQ(output.exit_code, 0);
  for (const char* flag : {"--path", "--file", "--size", "--seconds", "--rounds", "--depth",
                           "--block", "--tune", "--tune-seconds", "--model", "--json", "--report",
                           "--profile", "--no-fio", "--allow-raw-device"})
    EXPECT_THAT(output.out, HasSubstr(flag));
}

}  // namespace
}  // namespace ziggurat::test
