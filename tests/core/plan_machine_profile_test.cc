// SPDX-License-Identifier: Apache-2.0
// tests/core/plan_machine_profile_test.cc: a machine profile comes back as it was written, or is
// refused with the key's name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "core/plan/machine_profile.h"

namespace ziggurat {
namespace plan_machine_profile_test {

using ::testing::HasSubstr;

MachineProfile sample() {
  MachineProfile profile;
  profile.cpu_model = "A CPU \"with\" quotes";
  profile.kernel = "6.1.0";
  profile.host_adam_gb_per_s = 55.5;
  DriveProfile drive;
  drive.path = "/data";
  drive.device = "/dev/nvme0n1p1";
  drive.filesystem = "ext4";
  drive.engine = "io_uring";
  drive.measured_at = "2026-11-21T12:00:00Z";
  drive.read_gb_per_s = 3.25;
  drive.write_gb_per_s = 5.5;
  drive.mix_gb_per_s = 4.25;
  drive.sweep_gb_per_s = 4.125;
  drive.block_bytes = 1 << 20;
  drive.queue_depth = 16;
  drive.flags = {"unsteady", "small"};
  profile.drives.push_back(drive);
  profile.compute = ComputeProfile{.measured_at = "2026-11-21T12:00:00Z",
                                   .threads = 2,
                                   .layer_gflop_per_s = 200.5,
                                   .layer_fp32_gflop_per_s = 99.5,
                                   .unaligned_gflop_per_s = 150,
                                   .weights_gb_per_s = 40,
                                   .attention_gflop_per_s = 100,
                                   .pass_gb_per_s = 25,
                                   .copy_gb_per_s = 10.25,
                                   .kernels_gb_per_s = 16.5};
  profile.aio = DeepSpeedAio{.block_size = 524'288, .queue_depth = 32};
  return profile;
}

std::string complaint(const std::string& text) {
  try {
    static_cast<void>(parse_profile(text, "profile.json"));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "accepted";
}

struct Folder {
  Folder() {
    std::string pattern = (std::filesystem::current_path() / "profile-XXXXXX").string();
    path = ::mkdtemp(pattern.data());
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::filesystem::path path;
};

TEST(MachineProfile, ComesBackAsItWasWritten) {
  const MachineProfile written = sample();
  const MachineProfile read = parse_profile(to_json_text(written), "profile.json");
  EXPECT_EQ(to_json_text(read), to_json_text(written));
  EXPECT_EQ(read.cpu_model, written.cpu_model);
  ASSERT_EQ(read.drives.size(), 1U);
  EXPECT_EQ(read.drives[0].sweep_gb_per_s, 4.125);
  EXPECT_EQ(read.drives[0].outstanding_bytes(), 16U << 20);
  EXPECT_EQ(read.drives[0].flags, written.drives[0].flags);
  ASSERT_TRUE(read.compute);
  EXPECT_EQ(read.compute->layer_gflop_per_s, 200.5);
  EXPECT_EQ(read.compute->layer_fp32_gflop_per_s, 99.5);
  EXPECT_EQ(read.compute->threads, 2U);
  ASSERT_TRUE(read.aio);
  EXPECT_EQ(read.aio->queue_depth, 32U);
}

// As `bench io` alone writes it, and as it was written before cores were measured.
TEST(MachineProfile, OneWithoutFiguresOfCoresIsRead) {
  nlohmann::json old = nlohmann::json::parse(to_json_text(sample()));
  old.erase("compute");
  const MachineProfile read = parse_profile(old.dump(), "profile.json");
  EXPECT_FALSE(read.compute);
  EXPECT_EQ(nlohmann::json::parse(to_json_text(read)), old);
}

TEST(MachineProfile, MeasuringAPathAgainReplacesItsFigures) {
  MachineProfile profile = sample();
  DriveProfile again = profile.drives[0];
  again.read_gb_per_s = 9;
  profile.set_drive(again);
  ASSERT_EQ(profile.drives.size(), 1U);
  EXPECT_EQ(profile.find("/data")->read_gb_per_s, 9);
  again.path = "/other";
  profile.set_drive(again);
  EXPECT_EQ(profile.drives.size(), 2U);
  EXPECT_EQ(profile.find("/nowhere"), nullptr);
}

TEST(MachineProfile, AnythingUnknownMissingOrImpossibleIsAnErrorThatNamesIt) {
  using nlohmann::json;
  const json good = json::parse(to_json_text(sample()));
  const auto changed = [&](const char* pointer, const json& value) {
    json copy = good;
    copy[json::json_pointer(pointer)] = value;
    return complaint(copy.dump());
  };
  const auto without = [&](const char* parent, const char* key) {
    json copy = good;
    copy[json::json_pointer(parent)].erase(key);
    return complaint(copy.dump());
  };
  EXPECT_THAT(changed("/ziggurat_profile", 2), HasSubstr("version 2"));
  EXPECT_THAT(changed("/ziggurat_profile", "1"), HasSubstr("ziggurat_profile"));
  EXPECT_THAT(without("", "ziggurat_profile"), HasSubstr("not a machine profile"));
  EXPECT_THAT(changed("/surprise", 1), HasSubstr("unknown key \"surprise\""));
  EXPECT_THAT(changed("/machine/surprise", 1), HasSubstr("unknown key machine \"surprise\""));
  EXPECT_THAT(changed("/drives/0/surprise", 1), HasSubstr("unknown key drives[0] \"surprise\""));
  EXPECT_THAT(changed("/compute/surprise", 1), HasSubstr("unknown key compute \"surprise\""));
  EXPECT_THAT(changed("/compute/copy_gb_per_s", -1), HasSubstr("copy_gb_per_s"));
  EXPECT_THAT(changed("/aio/num_threads", 1), HasSubstr("unknown key aio \"num_threads\""));
  EXPECT_THAT(changed("/drives/0/read_gb_per_s", -1), HasSubstr("read_gb_per_s"));
  EXPECT_THAT(changed("/drives/0/read_gb_per_s", "fast"), HasSubstr("must be a number"));
  EXPECT_THAT(changed("/drives/0/queue_depth", 1.5), HasSubstr("queue_depth"));
  EXPECT_THAT(changed("/drives/0/queue_depth", -1), HasSubstr("queue_depth"));
  EXPECT_THAT(changed("/drives/0/flags", json::array({1})), HasSubstr("list of strings"));
  EXPECT_THAT(changed("/drives/0/flags", "small"), HasSubstr("must be a list of strings"));
  EXPECT_THAT(changed("/aio/single_submit", "false"), HasSubstr("true or false"));
  EXPECT_THAT(changed("/drives", json::object()), HasSubstr("\"drives\" must be a list"));
  EXPECT_THAT(without("/drives/0", "path"), HasSubstr("drives[0] \"path\" is missing"));
  EXPECT_THAT(without("", "machine"), HasSubstr("\"machine\" is missing"));
  EXPECT_THAT(complaint("{"), HasSubstr("not JSON"));
  EXPECT_THAT(complaint("[]"), HasSubstr("must be an object"));
  EXPECT_THAT(complaint(R"({"ziggurat_profile":1,"ziggurat_profile":1})"), HasSubstr("twice"));
  EXPECT_THAT(complaint(std::string(100, '[')), HasSubstr("nested"));
}

TEST(MachineProfile, IsWrittenWholePrivatelyAndWithItsFolders) {
  const Folder folder;
  const std::string path = folder.path / "made" / "here" / "profile.json";
  EXPECT_FALSE(read_profile(path));
  write_profile(sample(), path);
  write_profile(sample(), path);
  struct stat status {};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600U);
  const auto count = std::distance(std::filesystem::directory_iterator(folder.path / "made/here"),
                                   std::filesystem::directory_iterator());
  EXPECT_EQ(count, 1) << "a temporary file was left";
  EXPECT_EQ(to_json_text(read_profile(path).value()), to_json_text(sample()));
  std::ofstream(path) << R"({"ziggurat_profile": 2})";
  try {
    read_profile(path);
    ADD_FAILURE() << "a profile of another version is read";
  } catch (const Error& error) {  // measuring reads the file first, so it is no way out by itself
    EXPECT_THAT(error.what(), HasSubstr("reads version 1; remove the file, or move it away, and "
                                        "measure the machine again: `ziggurat profile` says how"));
  }
}

TEST(MachineProfile, LivesWhereXdgSays) {
  ::setenv("XDG_CONFIG_HOME", "/x", 1);
  EXPECT_EQ(default_profile_path(), "/x/ziggurat/profile.json");
  ::unsetenv("XDG_CONFIG_HOME");
  ::setenv("HOME", "/h", 1);
  EXPECT_EQ(default_profile_path(), "/h/.config/ziggurat/profile.json");
  ::unsetenv("HOME");
  EXPECT_THROW(default_profile_path(), Error);
}

}  // namespace plan_machine_profile_test
}  // namespace ziggurat
