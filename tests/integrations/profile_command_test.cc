// SPDX-License-Identifier: Apache-2.0
// tests/integrations/profile_command_test.cc: `ziggurat profile --measure` writes what `ziggurat
// plan --machine this` reads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>

#include "core/plan/machine_profile.h"
#include "tests/integrations/cli_process.h"

namespace ziggurat::test {
namespace profile_command_test {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(ProfileCommand, RefusesBeforeItMeasuresWhatCannotBeMeasured) {
  const TemporaryFolder folder;
  const Arguments measure{"profile", "--measure", "--file", folder / "profile.json"};
  const auto refused = [&](const Arguments& more) {
    const Output its = ziggurat(folder.path(), measure + more);
    EXPECT_EQ(its.exit_code, 1);
    EXPECT_FALSE(fs::exists(folder / "profile.json"));
    return its.err;
  };
  EXPECT_THAT(refused({"--path", folder / "none"}), HasSubstr("/none is no directory"));
  EXPECT_THAT(refused({"--size", "1"}), HasSubstr("size 1 is too small to measure a drive with"));
  EXPECT_THAT(refused({"--seconds", "nan"}), HasSubstr("must be a number from 0.05 to 60"));
}

// Cores and drive are measured, the file is the one that `plan --machine this` reads, and what an
// older file had of other drives stays.
TEST(ProfileCommand, MeasuresThisMachineForPlanning) {
  const TemporaryFolder folder;
  fs::create_directory(folder.path() / "drive");
  const std::string file = folder / "ziggurat/profile.json";
  MachineProfile old;
  DriveProfile& other = old.drives.emplace_back();
  other.path = "/elsewhere";
  other.sweep_gb_per_s = 1e-3;
  write_profile(old, file);
  ::setenv("XDG_CONFIG_HOME", folder.path().c_str(), 1);
  const Arguments question{"plan", "--model", "gpt2", "--machine", "this"};
  EXPECT_THAT(ziggurat(folder.path(), question).err,
              HasSubstr("this machine has not been measured: `ziggurat profile` says how"));
  EXPECT_THAT(ziggurat(folder.path(), {"profile"}).out, HasSubstr("cores        not measured"));

  const Output measured = ziggurat(folder.path(), {"profile", "--measure", "--seconds", "0.05",
                                                   "--size", "16MiB", "--path", folder / "drive"});
  ASSERT_EQ(measured.exit_code, 0) << measured.out << measured.err;
  EXPECT_THAT(measured.out, HasSubstr("GFLOP/s, bf16"));
  EXPECT_TRUE(fs::is_empty(folder.path() / "drive"));
  const MachineProfile profile = read_profile(file).value();
  ASSERT_TRUE(profile.compute);
  const ComputeProfile& compute = *profile.compute;
  for (const double rate :
       {compute.layer_gflop_per_s, compute.layer_fp32_gflop_per_s, compute.unaligned_gflop_per_s,
        compute.attention_gflop_per_s, compute.pass_gb_per_s, compute.copy_gb_per_s,
        compute.kernels_gb_per_s, profile.host_adam_gb_per_s}) {
    EXPECT_GT(rate, 0);
  }
  EXPECT_EQ(profile.drives.size(), 2U);
  EXPECT_GT(profile.find(folder / "drive")->sweep_gb_per_s, 0);

  const Output planned = ziggurat(folder.path(), question);
  EXPECT_EQ(planned.exit_code, 0) << planned.err;
  EXPECT_THAT(planned.out, AllOf(HasSubstr("trains on this machine"),
                                 HasSubstr("Figures of this machine: measured on"),
                                 HasSubstr("drive of " + (folder / "drive"))));

  const Arguments play{"simulate", "--machine", "this", "--model", "2x64x2", "--context", "64"};
  for (const Arguments& more :
       {Arguments{}, {"--ranks", "2", "--zero-stage", "3"}, {"--dtype", "fp32"}}) {
    const Output played = ziggurat(folder.path(), play + more);
    EXPECT_EQ(played.exit_code, 0) << played.err;
    EXPECT_THAT(played.out, HasSubstr("the cores' compute"));
  }

  MachineProfile none = profile;
  none.compute->weights_gb_per_s = 0;  // as it is where few rows and many take as long, each
  write_profile(none, file);
  EXPECT_THAT(ziggurat(folder.path(), {"profile"}).out,
              HasSubstr("weights take no time of their own"));

  MachineProfile of_another = profile;  // as where machines share a home directory
  of_another.cpu_model = "Another CPU";
  write_profile(of_another, file);
  EXPECT_THAT(ziggurat(folder.path(), question).out,
              AllOf(HasSubstr("measured on Another CPU"),
                    HasSubstr("but this machine has another CPU, " + profile.cpu_model)));
  ::unsetenv("XDG_CONFIG_HOME");
}

}  // namespace profile_command_test
}  // namespace ziggurat::test
