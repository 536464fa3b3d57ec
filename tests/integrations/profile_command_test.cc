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
       {compute.layer_gflop_per_s, compute.unaligned_gflop_per_s, compute.attention_gflop_per_s,
        compute.pass_gb_per_s, compute.copy_gb_per_s, profile.host_adam_gb_per_s}) {
    EXPECT_GT(rate, 0);
  }
  EXPECT_EQ(profile.drives.size(), 2U);
  EXPECT_GT(profile.find(folder / "drive")->sweep_gb_per_s, 0);

  const Output planned = ziggurat(folder.path(), question);
  EXPECT_EQ(planned.exit_code, 0) << planned.err;
  EXPECT_THAT(planned.out, AllOf(HasSubstr("trains on this machine"),
                                 HasSubstr("Figures of this machine: measured on"),
                                 HasSubstr("drive of " + (folder / "drive"))));
  ::unsetenv("XDG_CONFIG_HOME");
}

}  // namespace profile_command_test
}  // namespace ziggurat::test
