// SPDX-License-Identifier: Apache-2.0
// tests/tiers/store_succession_test.cc: one store in the place of another: whenever the power goes,
// one of the two is there whole, and what comes next finds it.
#include "tiers/store/store_succession.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "aio/simulated_engine.h"
#include "aio/text_file.h"
#include "base/error.h"

namespace ziggurat {
namespace store_succession_test {

using ::testing::HasSubstr;

/// What is in a directory: names, and what each file says.
using Files = std::map<std::string, std::string>;

class StoreSuccessionTest : public ::testing::Test {
 protected:
  StoreSuccessionTest() { reset(2); }

  /// A new machine with so many drives, and no file.
  void reset(std::size_t drives) {
    engines_.clear();
    disk_ = std::make_unique<SimulatedDisk>();
    places_.clear();
    start_programs(drives);
  }
  void start_programs(std::size_t drives) {
    engines_.clear();
    places_.clear();
    for (std::size_t i = 0; i < drives; ++i) {
      engines_.push_back(std::make_unique<SimulatedEngine>(reactor_, *disk_));
      places_.push_back(
          {.io = *engines_.back(), .observers = {}, .directory = "/drive" + std::to_string(i)});
    }
  }

  void write(std::size_t place, const std::string& name, const std::string& text) {
    const StripePlace& at = places_[place];
    const std::string path = at.directory + "/" + name;
    reactor_.block_on(write_text({reactor_, at.io}, path, text));
    at.io.sync_directory(path.substr(0, path.rfind('/')));
  }
  Files files_in(std::size_t place) {
    Files files;
    const StripePlace& at = places_[place];
    for (const std::string& name : at.io.names_in(at.directory)) {
      const std::string path = at.directory + "/" + name;
      if (!at.io.exists(path)) continue;  // a folder
      files[name] = reactor_.block_on(read_text({reactor_, at.io}, path, 1000));
    }
    return files;
  }
  /// Two ranks on two drives; what takes their place has three.
  void make_old() {
    write(0, "rank00000.ziggurat", "old 0");
    write(1, "rank00000-stripe01.ziggurat", "old 0.1");
    write(0, "rank00001.ziggurat", "old 1");
    write(1, "rank00001-stripe01.ziggurat", "old 1.1");
    write(0, "notes.txt", "mine");
  }
  void make_new(int ranks) {
    for (int rank = 0; rank < ranks; ++rank) {
      const std::string name = "resharded/rank0000" + std::to_string(rank);
      write(0, name + ".ziggurat", "new " + std::to_string(rank));
      write(1, name + "-stripe01.ziggurat", "new " + std::to_string(rank) + ".1");
    }
  }
  static std::vector<Files> old_files() {
    return {
        {{"rank00000.ziggurat", "old 0"}, {"rank00001.ziggurat", "old 1"}, {"notes.txt", "mine"}},
        {{"rank00000-stripe01.ziggurat", "old 0.1"}, {"rank00001-stripe01.ziggurat", "old 1.1"}}};
  }
  static std::vector<Files> new_files(int ranks) {
    std::vector<Files> files(2);
    for (int rank = 0; rank < ranks; ++rank) {
      const std::string name = "rank0000" + std::to_string(rank);
      files[0][name + ".ziggurat"] = "new " + std::to_string(rank);
      files[1][name + "-stripe01.ziggurat"] = "new " + std::to_string(rank) + ".1";
    }
    files[0]["notes.txt"] = "mine";
    return files;
  }
  std::vector<Files> found() { return {files_in(0), files_in(1)}; }

  void recover() {
    StoreSuccession succession(reactor_, places_);
    reactor_.block_on(succession.recover());
  }
  void complete() {
    StoreSuccession succession(reactor_, places_);
    succession.lock_old();
    reactor_.block_on(succession.complete());
  }
  bool folders_are_gone() {
    for (const StripePlace& place : places_) {
      try {
        if (!place.io.names_in(StoreSuccession::folder_in(place.directory)).empty()) return false;
      } catch (const Error&) {
      }
    }
    return true;
  }

  Reactor reactor_{Clock::Kind::kVirtual};
  std::unique_ptr<SimulatedDisk> disk_;
  std::vector<std::unique_ptr<SimulatedEngine>> engines_;
  std::vector<StripePlace> places_;
};

TEST_F(StoreSuccessionTest, PutsTheNewStoreInThePlaceOfTheOld) {
  for (const int ranks : {1, 2, 3}) {
    reset(2);
    make_old();
    make_new(ranks);
    complete();
    EXPECT_EQ(found(), new_files(ranks)) << ranks;
    EXPECT_TRUE(folders_are_gone());
    recover();
    EXPECT_EQ(found(), new_files(ranks)) << ranks;
  }
}

TEST_F(StoreSuccessionTest, RemovesWhatWasNotFinished) {
  make_old();
  make_new(3);
  recover();
  EXPECT_EQ(found(), old_files());
  EXPECT_TRUE(folders_are_gone());
}

/// At every event, with many outcomes for what was not synced then: also while what the first end
/// left is being recovered.
TEST_F(StoreSuccessionTest, LeavesOneOfTheTwoWholeWheneverThePowerGoes) {
  int old_stands = 0;
  int new_stands = 0;
  for (const int ranks : {1, 3}) {
    for (std::uint64_t event = 1;; ++event) {
      bool ended = false;
      for (std::uint64_t seed = 0; seed < 12; ++seed) {
        reset(2);
        make_old();
        make_new(ranks);
        disk_->cut_power_after(event);
        try {
          complete();
          ended = !disk_->power_is_off();
        } catch (const Error&) {
        }
        for (std::uint64_t again = 1; again <= 3; ++again) {
          engines_.clear();
          disk_->crash(seed * 7 + again);
          start_programs(2);
          // The machine dies once more, at another moment of the recovery, before it ends one.
          if (again < 3) disk_->cut_power_after(seed + again);
          try {
            recover();
          } catch (const Error&) {
            ASSERT_LT(again, 3U) << "event " << event << " seed " << seed;
          }
        }
        const bool is_new = found() == new_files(ranks);
        ASSERT_TRUE(is_new || found() == old_files()) << "event " << event << " seed " << seed;
        ASSERT_TRUE(folders_are_gone());
        ++(is_new ? new_stands : old_stands);
      }
      if (ended) break;
    }
  }
  EXPECT_GT(old_stands, 100);
  EXPECT_GT(new_stands, 100);
}

TEST_F(StoreSuccessionTest, DoesNotTouchAStoreThatIsInUse) {
  make_old();
  const FileHandle held =
      places_[1].io.open("/drive1/rank00001-stripe01.ziggurat", {.writable = true, .lock = true});
  make_new(3);
  StoreSuccession succession(reactor_, places_);
  EXPECT_THROW(succession.lock_old(), Error);
  EXPECT_THROW(recover(), Error);
  places_[1].io.close(held);
  EXPECT_EQ(found(), old_files());
  recover();
  EXPECT_TRUE(folders_are_gone());
}

// Rank 0 of a division was killed, and another one still builds.
TEST_F(StoreSuccessionTest, DoesNotTouchWhatAProcessStillBuilds) {
  make_old();
  make_new(2);
  write(1, "resharded/rank00002-stripe01.ziggurat.new", "half of it");
  for (const char* const name :
       {"rank00001-stripe01.ziggurat", "rank00002-stripe01.ziggurat.new"}) {
    const FileHandle held = places_[1].io.open(std::string("/drive1/resharded/") + name,
                                               {.writable = true, .lock = true});
    EXPECT_THROW(recover(), Error);
    places_[1].io.close(held);
    EXPECT_TRUE(places_[0].io.exists("/drive0/resharded/rank00000.ziggurat"));
    EXPECT_TRUE(places_[1].io.exists(std::string("/drive1/resharded/") + name));
  }
  recover();
  EXPECT_EQ(found(), old_files());
  EXPECT_TRUE(folders_are_gone());
}

TEST_F(StoreSuccessionTest, RefusesANoteThatMakesNoSenseAndFilesThatAreNowhere) {
  const auto refusal = [&] {
    try {
      recover();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("it went on");
  };
  make_old();
  make_new(3);
  write(0, "resharded/decided", "ziggurat store succession 1\n../../etc\n");
  EXPECT_THAT(refusal(),
              HasSubstr("/drive0/resharded/decided is not the note of a resharded store"));
  write(0, "resharded/decided", "ziggurat store succession 1\nrank00009.ziggurat\n");
  EXPECT_THAT(refusal(), HasSubstr("its file rank00009.ziggurat is missing"));
  write(1, "resharded/decided", "ziggurat store succession 1\nrank00000.ziggurat\n");
  EXPECT_THAT(refusal(), HasSubstr("different stores"));
  EXPECT_EQ(files_in(1).at("rank00000-stripe01.ziggurat"), "old 0.1");
  EXPECT_EQ(files_in(0).at("rank00000.ziggurat"), "old 0");
}

TEST_F(StoreSuccessionTest, OrdersDirectoriesAsTheOldStoresStripesLie) {
  reset(3);
  write(2, "rank00000.ziggurat", "first stripe");
  write(0, "rank00000-stripe01.ziggurat", "second stripe");
  const StoreSuccession succession(reactor_, places_);
  EXPECT_THAT(succession.order(), ::testing::ElementsAre(2, 0, 1));
}

}  // namespace store_succession_test
}  // namespace ziggurat
