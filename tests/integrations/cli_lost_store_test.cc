// SPDX-License-Identifier: Apache-2.0
// tests/integrations/cli_lost_store_test.cc: under which number a lost store is kept where each
// rank sees drives of its own machine.
#include "integrations/cli/lost_store.h"

#include <gtest/gtest.h>

#include <barrier>
#include <filesystem>
#include <fstream>
#include <thread>

#include "tests/support/scratch_directory.h"
#include "tiers/store/state_store.h"

namespace ziggurat::cli {
namespace cli_lost_store_test {

namespace fs = std::filesystem;

/// Machines with a rank and a directory each, whose store is lost.
class LostStoreOfMachines : public ::testing::Test {
 protected:
  static constexpr int kMachines = 2;

  void SetUp() override {
    for (int machine = 0; machine < kMachines; ++machine) {
      fs::create_directory(directory(machine));
      std::ofstream(file(machine)) << "lost, of machine " << machine;
    }
  }
  fs::path directory(int machine) const {
    return fs::path(scratch_.path()) / std::to_string(machine);
  }
  fs::path file(int machine) const { return directory(machine) / StateStore::file_name(machine); }
  std::vector<StoreDirectory> store(int machine) const {
    return {{.path = directory(machine).string()}};
  }
  /// What an earlier start has kept there.
  void keep_earlier(int machine, std::uint64_t number) const {
    const fs::path folder = directory(machine) / lost_folder(number);
    fs::create_directory(folder);
    std::ofstream(folder / StateStore::file_name(machine)) << "of an earlier store";
  }
  /// Every rank's, once all have kept their files.
  std::vector<std::uint64_t> kept() {
    std::vector<std::uint64_t> shared(kMachines);
    std::vector<std::uint64_t> numbers(kMachines);
    std::barrier<> all(kMachines);
    std::vector<std::thread> ranks;
    for (int machine = 0; machine < kMachines; ++machine) {
      ranks.emplace_back([&, machine] {
        const auto index = static_cast<std::size_t>(machine);
        numbers[index] = agreed_lost_number(store(machine), [&](std::uint64_t own) {
          shared[index] = own;
          all.arrive_and_wait();
          const std::vector<std::uint64_t> known = shared;
          all.arrive_and_wait();
          return known;
        });
        EXPECT_NO_THROW(keep_lost(store(machine), numbers[index])) << "machine " << machine;
      });
    }
    for (std::thread& rank : ranks) rank.join();
    return numbers;
  }

  testing::ScratchDirectory scratch_;
};

TEST_F(LostStoreOfMachines, IsKeptUnderANumberThatIsFreeOnEach) {
  keep_earlier(1, 1);
  keep_earlier(0, 2);
  EXPECT_EQ(kept(), (std::vector<std::uint64_t>{3, 3}));
  for (int machine = 0; machine < kMachines; ++machine) {
    const fs::path second = directory(machine) / lost_folder(3) / StateStore::file_name(machine);
    EXPECT_TRUE(fs::equivalent(file(machine), second)) << "machine " << machine;
  }
}

TEST_F(LostStoreOfMachines, IsFoundWhereAnEarlierStartHasKeptIt) {
  const std::vector<std::uint64_t> first = kept();
  EXPECT_EQ(kept(), first);
  EXPECT_FALSE(fs::exists(directory(0) / lost_folder(2)));
}

// The other machine was switched off before it had kept its own.
TEST_F(LostStoreOfMachines, IsKeptByAllWhereOneHadKeptItAlone) {
  keep_earlier(1, 1);
  keep_lost(store(0), 1);
  EXPECT_EQ(kept(), (std::vector<std::uint64_t>{2, 2}));
}

}  // namespace cli_lost_store_test
}  // namespace ziggurat::cli
