// SPDX-License-Identifier: Apache-2.0
// tests/integrations/cli_auto_test.cc: `ziggurat train` with budgets left to `auto`: the bits of
// every other run; what was chosen is said, and once, when some steps are made, what it took.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <regex>
#include <sstream>
#include <vector>

#include "base/bytes.h"
#include "core/plan/machine_profile.h"
#include "tests/integrations/cli_process.h"

namespace ziggurat::test {
namespace cli_auto_test {

using ::testing::HasSubstr;

const Arguments kAuto{"--placement", "auto", "--device-memory", "auto", "--host-memory", "auto"};

class CliAuto : public ::testing::Test {
 protected:
  std::string run(const Arguments& more, int steps = 6) {
    const Output output = ziggurat(
        folder_.path(), tiny_train(folder_, "store" + std::to_string(++count_), steps) + more);
    EXPECT_EQ(output.exit_code, 0) << output.err;
    return output.out;
  }
  static std::vector<std::string> lines(const std::string& out, const std::string& with) {
    std::vector<std::string> found;
    std::istringstream all(out);
    for (std::string line; std::getline(all, line);)
      if (line.find(with) != std::string::npos) found.push_back(line);
    return found;
  }
  TemporaryFolder folder_;
  int count_ = 0;
};

TEST_F(CliAuto, HasTheBitsOfARunByHand) {
  const auto expected = loss_bits(run({}));
  ASSERT_FALSE(expected.empty());
  EXPECT_EQ(loss_bits(run(kAuto)), expected);
  EXPECT_EQ(loss_bits(run({"--host-memory", "auto", "--placement", "all=nvme"})), expected);
}

TEST_F(CliAuto, SaysOnceWhatIsChosenAndOnceWhatItTook) {
  const std::string out = run(kAuto, 8);
  const std::vector<std::string> chosen = lines(out, "auto: ");
  ASSERT_EQ(chosen.size(), 1U) << out;
  EXPECT_THAT(chosen[0], HasSubstr("  auto: params=device,grads=host,optimizer=nvme, "));
  EXPECT_THAT(chosen[0], HasSubstr("a step moves "));
  EXPECT_THAT(chosen[0], HasSubstr("--host-memory "));
  const std::vector<std::string> compared = lines(out, "auto planned ");
  ASSERT_EQ(compared.size(), 1U) << out;
  const std::string size = R"([\d.]+ [KMG]?i?B)";
  const std::string sizes = size + " on the device, " + size + " on the host, " + size +
                            " in the store and " + size + " a step over NVMe";
  EXPECT_TRUE(std::regex_match(
      compared[0], std::regex("  auto planned " + sizes + R"((, in [\d.]+ s)?; step 4 had )" +
                              sizes + R"(, in [\d.]+ s)")))
      << compared[0];
}

/// More units are read ahead from a drive that is faster with more in flight, and are in what is
/// planned.
TEST_F(CliAuto, PlansWhatAMeasuredDriveIsGivenAtOnce) {
  MachineProfile profile;
  DriveProfile& drive = profile.drives.emplace_back();
  drive.path = folder_.path();
  drive.sweep_gb_per_s = drive.mix_gb_per_s = 1;
  drive.block_bytes = kMiB;
  drive.queue_depth = 64;
  write_profile(profile, folder_ / "measured/ziggurat/profile.json");
  const auto planned = [&](const char* config_home) {
    Arguments train = tiny_train(folder_, config_home, 5) +
                      Arguments{"--placement", "all=nvme", "--host-memory", "auto"};
    std::ranges::replace(train, "2x64x2", "8x64x2");
    const Output output =
        ziggurat(folder_.path(), train, {{"XDG_CONFIG_HOME", folder_ / config_home}});
    std::smatch host;
    const std::regex sizes(R"(auto planned .* on the device, (.* B|.*iB) on the host, .*; step)");
    EXPECT_TRUE(std::regex_search(output.out, host, sizes)) << output.out << output.err;
    return host.str(1);
  };
  EXPECT_NE(planned("measured"), planned("empty"));
}

TEST_F(CliAuto, SaysNothingOfItWhereAllIsGiven) {
  const std::string out = run({});
  EXPECT_TRUE(lines(out, "auto").empty()) << out;
}

TEST_F(CliAuto, KeepsWhatIsGivenByHand) {
  const std::string out = run({"--placement", "params=host,grads=nvme", "--host-memory", "auto",
                               "--device-memory", "9MiB"});
  const std::vector<std::string> chosen = lines(out, "auto: ");
  ASSERT_EQ(chosen.size(), 1U) << out;
  EXPECT_THAT(chosen[0], HasSubstr("params=host,grads=nvme,optimizer=nvme, --device-memory 9.0 "
                                   "MiB and --host-memory "));
}

TEST_F(CliAuto, IsAWordAndNoSizeOfNothing) {
  const Arguments train = tiny_train(folder_, "none", 1);
  const Output nothing = ziggurat(folder_.path(), train + Arguments{"--host-memory", "0"});
  EXPECT_EQ(nothing.exit_code, 2);
  EXPECT_THAT(nothing.err, HasSubstr("--host-memory 0 is too small: give 1.0 MiB or more"));
}

TEST_F(CliAuto, IsDecidedOnceForAllRanks) {
  const std::string out = run(kAuto + Arguments{"--nproc", "2"});
  EXPECT_EQ(lines(out, "auto: ").size(), 1U) << out;
  EXPECT_EQ(lines(out, "auto planned ").size(), 1U) << out;
}

TEST_F(CliAuto, ReportsNoChangeWhereARunGoesOnWithOtherMemory) {
  const Arguments first = tiny_train(folder_, "one", 2) + kAuto;
  ASSERT_EQ(ziggurat(folder_.path(), first).exit_code, 0);
  const Output again = ziggurat(folder_.path(), tiny_train(folder_, "one", 4) + kAuto);
  ASSERT_EQ(again.exit_code, 0) << again.err;
  EXPECT_THAT(again.out, HasSubstr("the run resumed at step 2"));
  EXPECT_TRUE(lines(again.out, "changed: host-memory").empty()) << again.out;
}

}  // namespace cli_auto_test
}  // namespace ziggurat::test
