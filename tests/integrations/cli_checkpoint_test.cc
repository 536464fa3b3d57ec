// SPDX-License-Identifier: Apache-2.0
// tests/integrations/cli_checkpoint_test.cc: checkpoints as a user makes, looks at and loads them:
// from the command line, killed and asked for by signals.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <thread>

#include "tests/integrations/cli_process.h"

namespace ziggurat::test {
namespace cli_checkpoint_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kSteps = 8;

std::string step_name(int step) {
  const std::string digits = std::to_string(step);
  return "step-" + std::string(9 - digits.size(), '0') + digits;
}

Output ckpt(const TemporaryFolder& folder, const Arguments& arguments) {
  return ziggurat(folder.path(), Arguments{"ckpt"} + arguments);
}

class CliCheckpoint : public ::testing::Test {
 protected:
  Arguments train(const std::string& store, int steps = kSteps) {
    return tiny_train(folder_, store, steps);
  }
  std::string checkpoints() const { return folder_ / "checkpoints"; }
  std::set<std::string> files_in(const std::string& name) const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_ / name))
      names.insert(entry.path().filename().string());
    return names;
  }

  TemporaryFolder folder_;
};

TEST_F(CliCheckpoint, IsWrittenAsOftenAsAskedForAndAtTheEndAndLoadsWithTheSameLosses) {
  const Output whole = ziggurat(
      folder_.path(),
      train("whole") + Arguments{"--checkpoint-dir", checkpoints(), "--checkpoint-every", "3"});
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  const auto is_made = [&](int step) {
    return std::filesystem::exists(checkpoints() + "/" + step_name(step) + "/manifest.json");
  };
  EXPECT_TRUE(is_made(3));
  // Steps of this size may take less time than a save: one that is due meanwhile waits, and says
  // so.
  EXPECT_NE(is_made(6), whole.out.find("the checkpoint due at step 6 waits") != std::string::npos)
      << whole.out;
  EXPECT_TRUE(is_made(kSteps));
  const Output loaded = ziggurat(
      folder_.path(), train("loaded") + Arguments{"--load", checkpoints() + "/" + step_name(3)});
  ASSERT_EQ(loaded.exit_code, 0) << loaded.err;
  EXPECT_THAT(loaded.out, HasSubstr("resumed at step 3"));
  std::map<int, std::string> expected = loss_bits(whole.out);
  for (int step = 1; step <= 3; ++step) expected.erase(step);
  EXPECT_EQ(loss_bits(loaded.out), expected);
  // The store goes before what is to be loaded: the same command goes on.
  const Output again =
      ziggurat(folder_.path(), train("loaded", kSteps + 2) +
                                   Arguments{"--load", checkpoints() + "/" + step_name(3)});
  ASSERT_EQ(again.exit_code, 0) << again.err;
  EXPECT_THAT(again.out, HasSubstr("resumed at step " + std::to_string(kSteps)));
}

TEST_F(CliCheckpoint, OfTheBestStepStays) {
  // At such a rate the held-out loss soon grows.
  const Output run = ziggurat(
      folder_.path(),
      train("store") + Arguments{"--checkpoint-dir", checkpoints(), "--lr", "0.3",
                                 "--checkpoint-every", "1", "--eval-every", "1", "--keep-last", "1",
                                 "--keep-best", "--json", folder_ / "report"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const nlohmann::json report = nlohmann::json::parse(contents(folder_ / "report"));
  std::pair<double, int> best{1e9, 0};
  for (const nlohmann::json& step : report.at("steps"))
    best = std::min(best, {step.at("held_out_loss").get<double>(), step.at("step").get<int>()});
  ASSERT_LT(best.second, kSteps);
  // One that is due while another is made waits: then the first after the best one stays.
  int kept = kSteps;
  for (const nlohmann::json& save : report.at("total").at("saves")) {
    const int step = save.at("step").get<int>();
    if (step >= best.second) kept = std::min(kept, step);
  }
  EXPECT_EQ(files_in("checkpoints"),
            (std::set<std::string>{".lock", "latest", step_name(kept), step_name(kSteps)}));
  const Output pruned = ckpt(folder_, {"prune", checkpoints(), "--keep-last", "1", "--keep-best"});
  EXPECT_THAT(pruned.out, HasSubstr(kept == kSteps ? "1 checkpoint stays" : "2 checkpoints stay"));
}

TEST_F(CliCheckpoint, OfOneRankGoesOnWithTwoThatShareItsBatches) {
  ASSERT_EQ(ziggurat(folder_.path(), train("one", 4) + Arguments{"--accumulate", "2",
                                                                 "--checkpoint-dir", checkpoints()})
                .exit_code,
            0);
  const Arguments from{"--load", checkpoints(), "--nproc", "2"};
  const Output other =
      ziggurat(folder_.path(), train("two") + from + Arguments{"--accumulate", "2"});
  EXPECT_EQ(other.exit_code, 1);
  EXPECT_THAT(other.err, AllOf(HasSubstr("sequences"), HasSubstr("--load-weights")));
  const Output two = ziggurat(
      folder_.path(),
      train("two") + from + Arguments{"--accumulate", "1", "--checkpoint-dir", folder_ / "second"});
  ASSERT_EQ(two.exit_code, 0) << two.err;
  EXPECT_THAT(two.out, HasSubstr("resumed at step 4"));
  const Output verified = ckpt(folder_, {"verify", folder_ / "second"});
  EXPECT_EQ(verified.exit_code, 0) << verified.err;
  EXPECT_THAT(verified.out,
              AllOf(HasSubstr("every byte"), HasSubstr("resume_manifest_complete: true")));
  // The whole job has seen the sequences of eight steps of one rank.
  EXPECT_THAT(ckpt(folder_, {"inspect", folder_ / "second"}).out,
              AllOf(HasSubstr("saved by 2 ranks"), HasSubstr("\"attempts\":8")));
}

TEST_F(CliCheckpoint, OfAStoreIsItsCopyAndAStoreLoadsOnAnotherNumberOfRanks) {
  const Output two =
      ziggurat(folder_.path(), train("two", 4) + Arguments{"--nproc", "2", "--accumulate", "3",
                                                           "--checkpoint-dir", checkpoints()});
  ASSERT_EQ(two.exit_code, 0) << two.err;
  EXPECT_EQ(ckpt(folder_, {"verify", folder_ / "two"}).exit_code, 0);
  EXPECT_EQ(ckpt(folder_, {"diff", folder_ / "two", checkpoints()}).exit_code, 0);
  const Output saved = ckpt(folder_, {"save", folder_ / "two", folder_ / "copy"});
  EXPECT_EQ(saved.exit_code, 0) << saved.err;
  EXPECT_EQ(ckpt(folder_, {"diff", folder_ / "copy", checkpoints()}).exit_code, 0);
  EXPECT_EQ(ckpt(folder_, {"save", folder_ / "copy", folder_ / "other"}).exit_code, 2);
  const auto three = [&](const std::string& store, const std::string& from) {
    const Output output =
        ziggurat(folder_.path(),
                 train(store) + Arguments{"--nproc", "3", "--accumulate", "2", "--load", from});
    EXPECT_EQ(output.exit_code, 0) << output.err;
    return loss_bits(output.out);
  };
  const std::map<int, std::string> losses = three("three", folder_ / "two");
  EXPECT_EQ(losses.size(), static_cast<std::size_t>(kSteps - 4));
  EXPECT_EQ(three("again", checkpoints()), losses);
}

TEST_F(CliCheckpoint, OfAStoreIsNotNeededToGoOnWithOtherRanksInItsPlace) {
  const Arguments two{"--nproc", "2", "--accumulate", "3"};
  const Arguments three{"--nproc", "3", "--accumulate", "2"};
  ASSERT_EQ(ziggurat(folder_.path(), train("store", 4) + two).exit_code, 0);
  const Output refused = ziggurat(folder_.path(), train("store") + three);
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_THAT(refused.err, HasSubstr("--resume reshard"));
  std::filesystem::copy(folder_ / "store", folder_ / "copy");
  const Output loaded =
      ziggurat(folder_.path(), train("loaded") + three + Arguments{"--load", folder_ / "copy"});
  ASSERT_EQ(loaded.exit_code, 0) << loaded.err;
  const Arguments reshard{"--resume", "reshard"};
  const Output other = ziggurat(
      folder_.path(), train("store") + Arguments{"--nproc", "3", "--accumulate", "3"} + reshard);
  EXPECT_EQ(other.exit_code, 1);
  EXPECT_THAT(other.err, HasSubstr("12 sequences"));
  const Output resharded = ziggurat(folder_.path(), train("store") + three + reshard);
  ASSERT_EQ(resharded.exit_code, 0) << resharded.err;
  EXPECT_THAT(resharded.out, HasSubstr("resumed at step 4"));
  EXPECT_EQ(loss_bits(resharded.out), loss_bits(loaded.out));
  EXPECT_EQ(ckpt(folder_, {"diff", folder_ / "store", folder_ / "loaded"}).exit_code, 0);
  // One rank's file takes the place of three.
  const Output one = ziggurat(
      folder_.path(), train("store", kSteps + 1) +
                          Arguments{"--accumulate", "6", "--state-format", "bf16"} + reshard);
  ASSERT_EQ(one.exit_code, 0) << one.err;
  EXPECT_THAT(one.out, HasSubstr("F32 to BF16, rounded"));
  EXPECT_EQ(files_in("store"), std::set<std::string>{"rank00000.ziggurat"});
}

/// A kill at any moment leaves the old store or the new one, and the same command goes on.
TEST_F(CliCheckpoint, OfAStoreIsNotNeededThoughReshardingItIsKilled) {
  const Arguments shapes[] = {{"--nproc", "2", "--accumulate", "3"},
                              {"--nproc", "3", "--accumulate", "2"}};
  ASSERT_EQ(ziggurat(folder_.path(), train("store", 2) + shapes[0]).exit_code, 0);
  std::mt19937 random(std::random_device{}());
  std::uniform_int_distribution<int> delay_ms(0, 300);
  const Arguments reshard{"--resume", "reshard"};
  for (int kill = 0; kill < 6; ++kill) {
    const Arguments& shape = shapes[(kill + 1) % 2];
    {
      Process run(folder_.path(), train("store", 100'000) + shape + reshard);
      std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms(random)));
      run.signal(SIGKILL);
      run.wait();
    }
    // What the killed run left is finished or removed, then cut anew if need be.
    const Output next = ziggurat(folder_.path(), train("store", 1) + shape + reshard);
    EXPECT_EQ(next.exit_code, 0) << next.err;
    EXPECT_EQ(ckpt(folder_, {"verify", folder_ / "store"}).exit_code, 0);
  }
}

TEST_F(CliCheckpoint, IsComparedConvertedAndPruned) {
  ASSERT_EQ(ziggurat(folder_.path(), train("run", 4) + Arguments{"--checkpoint-dir", checkpoints(),
                                                                 "--checkpoint-every", "2"})
                .exit_code,
            0);
  const std::string two = checkpoints() + "/" + step_name(2);
  const std::string four = checkpoints() + "/" + step_name(4);
  EXPECT_EQ(ckpt(folder_, {"diff", two, two}).exit_code, 0);
  const Output differ = ckpt(folder_, {"diff", two, four});
  EXPECT_EQ(differ.exit_code, 1);
  EXPECT_THAT(differ.out, HasSubstr("tensors differ"));
  // The masters of the newest checkpoint are those of the store.
  const Output exported = ckpt(folder_, {"to-hf", checkpoints(), folder_ / "hf"});
  EXPECT_EQ(exported.exit_code, 0) << exported.err;
  EXPECT_THAT(contents(folder_ / "hf/config.json"), HasSubstr("\"model_type\": \"gpt2\""));
  EXPECT_EQ(ckpt(folder_, {"to-hf", checkpoints(), folder_ / "hf"}).exit_code, 1);
  const Output pruned = ckpt(folder_, {"prune", checkpoints(), "--keep-last", "1"});
  EXPECT_EQ(pruned.exit_code, 0);
  EXPECT_FALSE(std::filesystem::exists(two));
  EXPECT_TRUE(std::filesystem::exists(four));
  EXPECT_EQ(ckpt(folder_, {"prune", checkpoints()}).exit_code, 2);
  const Output nowhere = ckpt(folder_, {"prune", folder_ / "nowhere", "--keep-last", "1"});
  EXPECT_EQ(nowhere.exit_code, 1);
  EXPECT_THAT(nowhere.err, HasSubstr("nowhere does not exist"));
}

/// Lines: the first; one that left it at step 2; one that left that at step 3.
TEST_F(CliCheckpoint, OfAWholeLineGoesOnlyByItsNameAndNotFromBetweenOthers) {
  const Arguments saves{"--checkpoint-dir", checkpoints(), "--checkpoint-every", "1"};
  ASSERT_EQ(ziggurat(folder_.path(), train("first", 2) + saves).exit_code, 0);
  const auto from = [&](int step) {
    return Arguments{"--load", checkpoints() + "/" + step_name(step)};
  };
  ASSERT_EQ(
      ziggurat(folder_.path(), train("second", 3) + saves + from(2) + Arguments{"--lr", "2e-3"})
          .exit_code,
      0);
  ASSERT_EQ(
      ziggurat(folder_.path(), train("third", 4) + saves + from(3) + Arguments{"--lr", "3e-3"})
          .exit_code,
      0);
  const auto line_of = [&](int step) {
    const std::string manifest = contents(checkpoints() + "/" + step_name(step) + "/manifest.json");
    return nlohmann::json::parse(manifest).at("line").at("id").get<std::string>().substr(0, 8);
  };
  const std::string first = line_of(2);
  const std::string second = line_of(3);
  ASSERT_NE(first, second);
  ASSERT_NE(second, line_of(4));
  const auto prune = [&](const Arguments& more) {
    return ckpt(folder_, Arguments{"prune", checkpoints()} + more);
  };
  const std::set<std::string> before = files_in("checkpoints");
  EXPECT_EQ(prune({"--line", first}).exit_code, 2) << "no number is not none";
  EXPECT_EQ(prune({"--line", first, "--keep-every", "2"}).exit_code, 2);
  EXPECT_EQ(prune({"--keep-last", "0"}).exit_code, 2);
  EXPECT_EQ(prune({"--line", first, "--keep-last", "0", "--keep-best"}).exit_code, 2);
  const Output between = prune({"--line", second, "--keep-last", "0"});
  EXPECT_NE(between.exit_code, 0);
  EXPECT_THAT(between.err, HasSubstr("remove line " + first + " first"));
  EXPECT_EQ(files_in("checkpoints"), before);
  write_file(checkpoints() + "/" + step_name(1) + "/manifest.json",
             contents(checkpoints() + "/" + step_name(1) + "/manifest.json") + "x");
  EXPECT_EQ(prune({"--line", first, "--keep-last", "0"}).exit_code, 0);
  EXPECT_EQ(files_in("checkpoints").count(step_name(1)), 0U) << "its line can be read";
  EXPECT_EQ(files_in("checkpoints").count(step_name(2)), 0U);
  EXPECT_EQ(prune({"--line", second, "--keep-last", "0"}).exit_code, 0);
  EXPECT_EQ(files_in("checkpoints"), (std::set<std::string>{".lock", "latest", step_name(4)}));
}

TEST_F(CliCheckpoint, IsFoundInAFolderWhoseNameHasACommaInIt) {
  const std::string folder = folder_ / "lr=0.1,seed=5";
  ASSERT_EQ(
      ziggurat(folder_.path(), train("run", 2) + Arguments{"--checkpoint-dir", folder}).exit_code,
      0);
  const Output verified = ckpt(folder_, {"verify", folder});
  EXPECT_EQ(verified.exit_code, 0) << verified.err;
  const Output loaded = ziggurat(folder_.path(), train("other", 3) + Arguments{"--load", folder});
  EXPECT_EQ(loaded.exit_code, 0) << loaded.err;
}

TEST_F(CliCheckpoint, ThatIsDamagedIsNamedAndNotLoaded) {
  ASSERT_EQ(ziggurat(folder_.path(), train("run", 2) + Arguments{"--checkpoint-dir", checkpoints()})
                .exit_code,
            0);
  for (const auto& entry :
       std::filesystem::directory_iterator(checkpoints() + "/" + step_name(2))) {
    if (entry.path().extension() != ".safetensors") continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(entry.file_size() - 100));
    file.put('x').put('y');
  }
  const Output verified = ckpt(folder_, {"verify", checkpoints()});
  EXPECT_EQ(verified.exit_code, 1);
  EXPECT_THAT(verified.err, AllOf(HasSubstr(".safetensors"), HasSubstr("are damaged")));
  const Output loaded =
      ziggurat(folder_.path(), train("loaded") + Arguments{"--load", checkpoints()});
  EXPECT_EQ(loaded.exit_code, 1);
  EXPECT_THAT(loaded.err, HasSubstr("are damaged"));
}

TEST_F(CliCheckpoint, IsMadeWhenASignalAsksForIt) {
  Process run(folder_.path(), train("run", 100'000) + Arguments{"--checkpoint-dir", checkpoints()});
  ASSERT_TRUE(run.wait_for_output("step 3 loss-bits")) << run.err();
  run.signal(SIGUSR1);
  ASSERT_TRUE(run.wait_for_output("a rank in")) << run.err();
  run.signal(SIGTERM);
  const Output output = run.wait();
  EXPECT_EQ(output.exit_code, 130);
  EXPECT_EQ(ckpt(folder_, {"verify", checkpoints()}).exit_code, 0);
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(checkpoints()))
    count += entry.is_directory() ? 1 : 0;
  EXPECT_EQ(count, 2);  // the one that was asked for, and that of the end
}

/// The newest checkpoint always verifies, and a run that is killed at any moment leaves no other.
TEST_F(CliCheckpoint, IsWholeOrAbsentWheneverTheRunIsKilled) {
  std::mt19937 random(std::random_device{}());
  std::uniform_int_distribution<int> delay_ms(0, 900);
  for (int kill = 0; kill < 12; ++kill) {
    {
      Process run(folder_.path(),
                  train("run", 100'000) + Arguments{"--checkpoint-dir", checkpoints(),
                                                    "--checkpoint-every", "2", "--keep-last", "3"});
      std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms(random)));
      run.signal(SIGKILL);
      run.wait();
    }
    if (!std::filesystem::exists(checkpoints())) continue;
    for (const auto& entry : std::filesystem::directory_iterator(checkpoints())) {
      if (!std::filesystem::exists(entry.path() / "manifest.json")) continue;
      const Output verified = ckpt(folder_, {"verify", entry.path().string()});
      EXPECT_EQ(verified.exit_code, 0) << verified.err;
    }
  }
}

TEST_F(CliCheckpoint, SettingsThatNeedEachOtherSaySo) {
  const auto refused = [&](const Arguments& arguments) {
    const Output output = ziggurat(folder_.path(), train("none") + arguments);
    EXPECT_EQ(output.exit_code, 2);
    return output.err;
  };
  EXPECT_THAT(refused({"--checkpoint-every", "2"}), HasSubstr("give --checkpoint-dir too"));
  EXPECT_THAT(refused({"--checkpoint-every-minutes", "2"}), HasSubstr("--checkpoint-dir"));
  EXPECT_THAT(refused({"--load-weights"}), HasSubstr("give --load too"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "none"));
  const Output nothing = ckpt(folder_, {"verify"});
  EXPECT_EQ(nothing.exit_code, 2);
  EXPECT_THAT(nothing.err,
              AllOf(HasSubstr("checkpoint is required"), HasSubstr("ckpt verify --help")));
}

}  // namespace cli_checkpoint_test
}  // namespace ziggurat::test
