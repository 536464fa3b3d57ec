// SPDX-License-Identifier: Apache-2.0
// tests/core/checkpoint_files_test.cc: a checkpoint's files on the disk: what goes wrong with one,
// at whatever byte, is found and named; and which checkpoints stay.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <random>

#include "aio/faulty_engine.h"
#include "tests/core/checkpoint_rig.h"

namespace ziggurat::testing {
namespace checkpoint_files_test {

using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string file_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
void set_file_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

Task<> prove_everything(CheckpointReader& reader) {
  for (std::size_t f = 0; f < reader.manifest().files.size(); ++f) co_await reader.prove_header(f);
  for (const StatePiece& piece : reader.manifest().pieces) co_await reader.prove(piece);
}

class SavedCheckpoint : public ::testing::Test {
 protected:
  void SetUp() override {
    on_ranks({.name = "two", .ranks = 2}, scratch_, "", [&](CheckpointRank& rank) {
      rank.step();
      rank.engine->save_checkpoint({.folder = folder_, .resume = {}});
    });
    runtime_ = Runtime::create({.threads = 1, .trace_path = ""});
  }
  std::string directory() const { return folder_ + "/" + checkpoint_name(1); }

  /// What opening and proving it says; "whole" if nothing.
  std::string verdict() {
    try {
      OpenCheckpoint checkpoint(*runtime_, directory());
      runtime_->reactor.block_on(prove_everything(checkpoint.reader()));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDataLoss) << error.what();
      return error.what();
    }
    return "whole";
  }

  ScratchDirectory scratch_;
  std::string folder_ = scratch_.path() + "/checkpoints";
  std::unique_ptr<Runtime> runtime_;
};

TEST_F(SavedCheckpoint, IsWholeAndNamedAsTheLatest) {
  EXPECT_EQ(verdict(), "whole");
  EXPECT_EQ(file_bytes(folder_ + "/latest"), checkpoint_name(1) + "\n");
}

/// Only who may open the lock could hold it, so that nobody else saves.
TEST_F(SavedCheckpoint, IsReadByWhomTheUmaskLets) {
  const mode_t usual = ::umask(027);
  std::filesystem::remove_all(folder_);
  SetUp();
  ::umask(usual);
  const auto mode_of = [](const std::string& path) {
    struct stat status {};
    EXPECT_EQ(::stat(path.c_str(), &status), 0) << path;
    return status.st_mode & 0777;
  };
  for (const auto& file : std::filesystem::directory_iterator(directory()))
    EXPECT_EQ(mode_of(file.path()), 0640U) << file.path();
  EXPECT_EQ(mode_of(directory()), 0750U);
  EXPECT_EQ(mode_of(folder_ + "/latest"), 0640U);
  EXPECT_EQ(mode_of(folder_ + "/.lock"), 0600U);
}

TEST_F(SavedCheckpoint, NamesTheFileOfEveryDamagedByte) {
  std::mt19937_64 random(3);
  for (const auto& entry : std::filesystem::directory_iterator(directory())) {
    const std::string path = entry.path().string();
    const std::string whole = file_bytes(path);
    for (int i = 0; i < 60; ++i) {
      std::string damaged = whole;
      switch (random() % 4) {
        case 0:
          damaged[random() % damaged.size()] ^= static_cast<char>(1U << (random() % 8));
          break;
        case 1: damaged.resize(random() % damaged.size()); break;
        case 2: damaged += 'x'; break;
        case 3: {  // a sector of it is another one's
          const std::size_t size = std::min<std::size_t>(512, damaged.size() / 2);
          damaged.replace(0, size, damaged.substr(damaged.size() - size));
          break;
        }
      }
      if (damaged == whole) continue;
      set_file_bytes(path, damaged);
      EXPECT_THAT(verdict(), HasSubstr(entry.path().filename().string()));
    }
    set_file_bytes(path, whole);
  }
  EXPECT_EQ(verdict(), "whole");
}

TEST_F(SavedCheckpoint, NamesAFileThatIsMissingOrAnotherOnes) {
  std::vector<std::string> shards;
  for (const auto& entry : std::filesystem::directory_iterator(directory())) {
    if (entry.path().extension() == ".safetensors") shards.push_back(entry.path().string());
  }
  std::ranges::sort(shards);
  std::filesystem::rename(shards[0], shards[0] + ".away");
  EXPECT_THAT(verdict(), AllOf(HasSubstr("missing"), HasSubstr("rank-00000")));
  std::filesystem::rename(shards[0] + ".away", shards[0]);
  const std::string first = file_bytes(shards[0]);
  const std::string second = file_bytes(shards.back());
  set_file_bytes(shards[0], second);
  set_file_bytes(shards.back(), first);
  EXPECT_THAT(verdict(), HasSubstr(".safetensors"));
}

TEST_F(SavedCheckpoint, IsNoneWithoutItsManifest) {
  std::filesystem::remove(directory() + "/manifest.json");
  ThreadEngine io(runtime_->reactor);
  EXPECT_THAT(whole_checkpoints(io, folder_), ::testing::IsEmpty());
  EXPECT_THROW(runtime_->reactor.block_on(find_checkpoint({runtime_->reactor, io}, folder_)),
               Error);
}

/// A store that trains, say, which one rank opened a step later than the other.
TEST_F(SavedCheckpoint, IsNotLoadedBesideAnotherStepsByOtherRanks) {
  const Layout two{.name = "again", .ranks = 2};
  on_ranks(two, scratch_, directory(), [&](CheckpointRank& rank) {
    rank.step();
    rank.engine->save_checkpoint({.folder = folder_, .resume = {}});
  });
  const auto runtimes = connected_runtimes(2, 1);
  const std::string store = scratch_.path() + "/mixed";
  const auto errors = run_ranks(2, [&](int rank) {
    const std::string from = folder_ + "/" + checkpoint_name(rank == 0 ? 1 : 2);
    CheckpointRank its(*runtimes[static_cast<std::size_t>(rank)], two, config_of(two, store), from);
  });
  for (const std::exception_ptr& error : errors)
    EXPECT_THAT(error_in(error).what(),
                HasSubstr("the ranks found different newest steps (1 to 2)"));
  EXPECT_FALSE(std::filesystem::exists(store + "/rank00000.ziggurat"));
}

TEST_F(SavedCheckpoint, IsNotWrittenOver) {
  on_ranks({.name = "again", .ranks = 2}, scratch_, directory(), [&](CheckpointRank& rank) {
    // It began a line of its own, whose step 1 lies beside the first one's.
    rank.engine->save_checkpoint({.folder = folder_, .resume = {}});
    rank.step();
    rank.engine->save_checkpoint({.folder = folder_, .resume = {}});
    try {
      rank.engine->save_checkpoint({.folder = folder_, .resume = {}});
      ADD_FAILURE() << "written over";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), AnyOf(HasSubstr("exists already"), HasSubstr("could not save")));
    }
  });
  EXPECT_EQ(verdict(), "whole");
  EXPECT_TRUE(std::filesystem::exists(folder_ + "/" + checkpoint_name(2) + "/manifest.json"));
}

TEST_F(SavedCheckpoint, TakesThePlaceOfWhatWasCutOff) {
  const std::string half = folder_ + "/" + checkpoint_name(2);
  std::filesystem::create_directory(half);
  set_file_bytes(half + "/rank-00000-of-00009-00000.safetensors", "half");
  on_ranks({.name = "again"}, scratch_, directory(), [&](CheckpointRank& rank) {
    rank.step();
    rank.engine->save_checkpoint({.folder = folder_, .resume = {}});
  });
  EXPECT_FALSE(std::filesystem::exists(half + "/rank-00000-of-00009-00000.safetensors"));
  EXPECT_TRUE(std::filesystem::exists(half + "/manifest.json"));
}

/// A save that was killed, or a removal: of whatever step it was.
TEST_F(SavedCheckpoint, RemovesWhatWasCutOffOfOtherSteps) {
  for (const std::uint64_t step : {0, 5}) {
    const std::string half = folder_ + "/" + checkpoint_name(step);
    std::filesystem::create_directory(half);
    set_file_bytes(half + "/rank-00000-of-00009-00000.safetensors", "half");
    set_file_bytes(half + "/manifest.json.part", "half");
  }
  on_ranks({.name = "again"}, scratch_, directory(), [&](CheckpointRank& rank) {
    rank.step();
    rank.engine->save_checkpoint({.folder = folder_, .resume = {}});
  });
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/" + checkpoint_name(0)));
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/" + checkpoint_name(5)));
  EXPECT_EQ(verdict(), "whole");
}

/// What one removes as cut off, the other would be writing.
TEST_F(SavedCheckpoint, IsNotMadeWhileAnotherProcessSavesInTheFolder) {
  ThreadEngine io(runtime_->reactor);
  const FileHandle held = io.open(folder_ + "/.lock", {.writable = true, .lock = true});
  on_ranks({.name = "again"}, scratch_, directory(), [&](CheckpointRank& rank) {
    rank.step();
    const CheckpointRequest request{.folder = folder_, .resume = {}};
    try {
      rank.engine->save_checkpoint(request);
      ADD_FAILURE() << "two at a time";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("another save in " + folder_ + " is under way"));
      EXPECT_THAT(error.what(), HasSubstr("is in use by"));
    }
    io.close(held);
    rank.engine->save_checkpoint(request);
  });
  EXPECT_TRUE(std::filesystem::exists(folder_ + "/" + checkpoint_name(2) + "/manifest.json"));
}

/// On a filesystem without locks another process may be writing whatever has not this line's name.
TEST(SaveWithoutLocks, RemovesOfWhatWasCutOffWhatHasItsOwnNameAndSaysWhatStays) {
  const ScratchDirectory scratch;
  const std::string folder = scratch.path() + "/saved";
  const auto runtimes = connected_runtimes(1, 1);
  FaultyEngine* target = nullptr;
  runtimes[0]->io_engine = [&, usual = runtimes[0]->io_engine](
                               Reactor& reactor,
                               const std::string& directory) -> std::unique_ptr<IoEngine> {
    if (directory != folder) return usual(reactor, directory);
    auto faulty = std::make_unique<FaultyEngine>(reactor, std::make_unique<ThreadEngine>(reactor));
    faulty->plan(Fault::fail(FaultPoint::kOpen, ENOLCK));  // the lock is opened first
    faulty->plan(Fault::fail(FaultPoint::kWrite, EIO));
    target = faulty.get();
    return faulty;
  };
  const Layout layout{.name = "one"};
  CheckpointRank rank(*runtimes[0], layout, config_of(layout, scratch.path() + "/store"), "");
  const LineId line = rank.engine->line().id;
  const auto half = [&](const std::string& name) {
    return folder + "/" + name + "/rank-00000-of-00009-00000.safetensors";
  };
  const std::vector<std::string> others{checkpoint_name(1), checkpoint_name(2), checkpoint_name(5),
                                        checkpoint_name(1, LineId{7, 7})};
  const std::string own = checkpoint_name(1, line);
  for (const std::string& name : others) {
    std::filesystem::create_directories(folder + "/" + name);
    set_file_bytes(half(name), "half");
  }
  std::filesystem::create_directory(folder + "/" + own);
  set_file_bytes(half(own), "half");
  const CheckpointRequest request{.folder = folder, .resume = {}};
  EXPECT_TRUE(rank.step(&request).saves);
  rank.engine->finish_saves();
  const std::vector<SaveOutcome> outcomes = rank.engine->ended_saves();
  ASSERT_EQ(outcomes.size(), 1U);
  EXPECT_TRUE(outcomes[0].failure) << "its first write failed";
  EXPECT_FALSE(std::filesystem::exists(half(own)));
  for (const std::string& name : others) EXPECT_TRUE(std::filesystem::exists(half(name))) << name;
  runtimes[0]->reactor.block_on([](FaultyEngine& files) -> Task<> {
    files.plan(Fault::fail(FaultPoint::kOpen, ENOLCK).at(files.calls(FaultPoint::kOpen)));
    co_return;
  }(*target));
  rank.step();
  rank.engine->save_checkpoint(request);
  const std::vector<SaveOutcome> whole = rank.engine->ended_saves();
  ASSERT_EQ(whole.size(), 1U);
  EXPECT_THAT(whole[0].notes, Contains(HasSubstr("this filesystem has no locks")));
  EXPECT_TRUE(std::filesystem::exists(folder + "/" + checkpoint_name(2, line) + "/manifest.json"));
  for (const std::string& name : others) EXPECT_TRUE(std::filesystem::exists(half(name))) << name;
  rank.end();
}

TEST(SaveWithoutLocks, RemovesWhatAKillLeftOfAnEarlierOneOfItsLine) {
  const ScratchDirectory scratch;
  const std::string folder = scratch.path() + "/saved";
  const auto runtimes = connected_runtimes(1, 1);
  FaultyEngine* target = nullptr;
  runtimes[0]->io_engine = [&, usual = runtimes[0]->io_engine](
                               Reactor& reactor,
                               const std::string& directory) -> std::unique_ptr<IoEngine> {
    if (directory != folder) return usual(reactor, directory);
    auto faulty = std::make_unique<FaultyEngine>(reactor, std::make_unique<ThreadEngine>(reactor));
    faulty->plan(Fault::fail(FaultPoint::kOpen, ENOLCK));  // the lock is opened first
    target = faulty.get();
    return faulty;
  };
  const Layout layout{.name = "one"};
  CheckpointRank rank(*runtimes[0], layout, config_of(layout, scratch.path() + "/store"), "");
  const CheckpointRequest request{.folder = folder, .resume = {}};
  rank.step();
  rank.engine->save_checkpoint(request);
  std::string name = file_bytes(folder + "/latest");
  name.pop_back();  // the line's end
  ASSERT_TRUE(std::filesystem::remove(folder + "/" + name + "/manifest.json"));
  runtimes[0]->reactor.block_on([](FaultyEngine& files) -> Task<> {
    files.plan(Fault::fail(FaultPoint::kOpen, ENOLCK).at(files.calls(FaultPoint::kOpen)));
    co_return;
  }(*target));
  rank.step();
  rank.engine->save_checkpoint(request);
  EXPECT_FALSE(std::filesystem::exists(folder + "/" + name));
  EXPECT_EQ(file_bytes(folder + "/latest"), checkpoint_name(2, rank.engine->line().id) + "\n");
  rank.end();
}

TEST(Retention, LetsTheOldOnesGoButForThoseOfSomeSteps) {
  const std::vector<std::uint64_t> steps{10, 20, 25, 30, 40};
  EXPECT_THAT(expired(steps, {}, {}), ::testing::IsEmpty());
  EXPECT_THAT(expired(steps, {.keep_last = 2}, {}), ElementsAre(10, 20, 25));
  EXPECT_THAT(expired(steps, {.keep_last = 1, .keep_every = 20}, {}), ElementsAre(10, 25, 30));
  EXPECT_THAT(expired(steps, {.keep_last = 9}, {}), ::testing::IsEmpty());
}

TEST(Retention, KeepsTheBestOrTheFirstAfterIt) {
  const std::vector<std::uint64_t> steps{10, 20, 25, 30, 40};
  const Retention retention{.keep_last = 1, .keep_best = true};
  EXPECT_THAT(expired(steps, retention, 20), ElementsAre(10, 25, 30));
  EXPECT_THAT(expired(steps, retention, 22), ElementsAre(10, 20, 30));
  EXPECT_THAT(expired(steps, retention, 1), ElementsAre(20, 25, 30));
  EXPECT_THAT(expired(steps, retention, 40), ElementsAre(10, 20, 25, 30));
  EXPECT_THAT(expired(steps, retention, {}), ElementsAre(10, 20, 25, 30)) << "none is known yet";
  EXPECT_THAT(expired(steps, {.keep_last = 1}, 20), ElementsAre(10, 20, 25, 30));
}

TEST(Retention, TheBestStepIsWhatTheMetricNames) {
  const auto of = [](const char* text) {
    StateContent content;
    content.resume["best_metric"] = text;
    return best_step(content);
  };
  EXPECT_EQ(of(R"({"name": "loss", "step": 7, "value": 2.5})"), 7U);
  for (const char* const none : {"null", "{}", R"({"step": -1})", R"({"step": "7"})", "[7]", "7"})
    EXPECT_EQ(of(none), std::nullopt) << none;
  EXPECT_EQ(best_step({}), std::nullopt);
}

TEST(Retention, RemovesOldCheckpointsOnceTheNewOneIsWhole) {
  const ScratchDirectory scratch;
  const std::string folder = scratch.path() + "/checkpoints";
  on_ranks({.name = "one"}, scratch, "", [&](CheckpointRank& rank) {
    for (int step = 0; step < 5; ++step) {
      rank.step();
      rank.engine->save_checkpoint(
          {.folder = folder, .resume = {}, .keep_last = 2, .keep_every = 2});
    }
  });
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.push_back(entry.path().filename().string());
  EXPECT_THAT(names, ::testing::UnorderedElementsAre(checkpoint_name(2), checkpoint_name(4),
                                                     checkpoint_name(5), "latest", ".lock"));
}

// As somebody does who makes room.
TEST(SaveFolder, IsMadeAgainIfItIsRemovedBetweenSaves) {
  const ScratchDirectory scratch;
  const std::string folder = scratch.path() + "/checkpoints";
  on_ranks({.name = "one"}, scratch, "", [&](CheckpointRank& rank) {
    for (int step = 0; step < 2; ++step) {
      rank.step();
      std::filesystem::remove_all(folder);
      rank.engine->save_checkpoint({.folder = folder, .resume = {}});
    }
  });
  EXPECT_EQ(file_bytes(folder + "/latest"), checkpoint_name(2) + "\n");
}

/// A run that went back (an older checkpoint loaded after the loss had spiked) has newer ones
/// beside it, whatever their steps.
TEST(Retention, NeverTouchesTheCheckpointThatWasJustMade) {
  const ScratchDirectory scratch;
  const std::string folder = scratch.path() + "/checkpoints";
  on_ranks({.name = "first"}, scratch, "", [&](CheckpointRank& rank) {
    for (int step = 0; step < 6; ++step) {
      rank.step();
      if (step % 2 == 1) rank.engine->save_checkpoint({.folder = folder, .resume = {}});
    }
  });
  on_ranks({.name = "back"}, scratch, folder + "/" + checkpoint_name(2), [&](CheckpointRank& rank) {
    rank.step();
    rank.engine->save_checkpoint({.folder = folder, .resume = {}, .keep_last = 1});
  });
  EXPECT_EQ(file_bytes(folder + "/latest"), checkpoint_name(3) + "\n");
  for (const std::uint64_t step : {3, 4, 6})
    EXPECT_TRUE(std::filesystem::exists(folder + "/" + checkpoint_name(step) + "/manifest.json"))
        << step;
}

}  // namespace checkpoint_files_test
}  // namespace ziggurat::testing
