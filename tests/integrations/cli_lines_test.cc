// SPDX-License-Identifier: Apache-2.0
// tests/integrations/cli_lines_test.cc: runs that go back in every way, in folders that have
// checkpoints already, with every kind of retention: what was just saved is there, the newest
// checkpoint of each line of history is, the right one is gone on from, and the losses are those of
// a run that never went back.
//
// A few of each way; ZIGGURAT_SEEDS=200 is the campaign: so many runs altogether.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <regex>
#include <set>
#include <thread>

#include "tests/integrations/cli_process.h"

namespace ziggurat::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kReferenceSteps = 300;

struct Checkpoint {
  int step = 0;
  std::string line;
  std::string directory;
};

std::optional<Checkpoint> checkpoint_in(const fs::path& directory) {
  const nlohmann::json manifest =
      nlohmann::json::parse(contents(directory / "manifest.json"), nullptr, false);
  if (manifest.is_discarded()) return std::nullopt;
  return Checkpoint{.step = manifest.at("content").at("step").get<int>(),
                    .line = manifest.at("line").at("id").get<std::string>(),
                    .directory = directory.string()};
}

/// By its directory's name.
int step_of(const std::string& directory) {
  return std::stoi(fs::path(directory).filename().string().substr(5, 9));
}

std::optional<int> resumed_at(const Output& output) {
  std::smatch found;
  if (!std::regex_search(output.out, found, std::regex("resumed at step (\\d+) of")))
    return std::nullopt;
  return std::stoi(found[1]);
}

/// Both slots of the records in a part of the file, or so much of a shard.
void damage(const fs::path& file) {
  std::string bytes = contents(file);
  for (std::size_t at = bytes.size() / 2; at < bytes.size() * 3 / 4; at += 512) bytes[at] ^= 1;
  write_file(file, bytes);
}

/// One run of the campaign: a folder of checkpoints, and lives that save in it.
class Lives {
 public:
  explicit Lives(std::uint64_t seed) : random_(seed) {
    every_ = std::to_string(pick(1, 3));
    constexpr const char* kRetentions[][5] = {{},
                                              {"--keep-last", "1"},
                                              {"--keep-last", "2"},
                                              {"--keep-last", "3", "--keep-every", "4"},
                                              {"--keep-last", "1", "--keep-best"}};
    const auto which = static_cast<std::size_t>(pick(0, 4));
    for (const char* const word : kRetentions[which])
      if (word != nullptr) retention_.emplace_back(word);
    if (which == 4) retention_.insert(retention_.end(), {"--eval-every", "2"});
  }

  int pick(int least, int most) { return std::uniform_int_distribution<int>(least, most)(random_); }
  std::string checkpoints() const { return folder_ / "checkpoints"; }
  std::string store(const std::string& name) const { return folder_ / name; }

  Arguments arguments(const std::string& store, int steps, const Arguments& more) const {
    return tiny_train(folder_, store, steps) +
           Arguments{"--checkpoint-dir", checkpoints(), "--checkpoint-every", every_} + retention_ +
           more;
  }
  /// Until it ends.
  Output live(const std::string& store, int steps, const Arguments& more = {}) {
    const Output output = ziggurat(folder_.path(), arguments(store, steps, more));
    judge(output, more);
    return output;
  }
  /// Killed once it has saved so often.
  Output die(const std::string& store, int saves, const Arguments& more = {}) {
    Process run(folder_.path(), arguments(store, 100'000, more));
    std::string line;
    const auto has_saved = [&] {
      const std::vector<std::string> saved = saved_in(run.out());
      if (!saved.empty() && line.empty()) {
        if (const auto its = checkpoint_in(saved.back())) line = its->line;
      }
      return saved.size() >= static_cast<std::size_t>(saves) && !line.empty();
    };
    EXPECT_TRUE(run.wait_until(has_saved)) << run.out() << run.err();
    std::this_thread::sleep_for(std::chrono::milliseconds(pick(0, 20)));
    run.signal(SIGKILL);
    const Output output = run.wait();
    judge(output, more, line);
    return output;
  }
  Process start(const std::string& store, int steps, const Arguments& more) {
    return {folder_.path(), arguments(store, steps, more)};
  }

  /// The directories that a life says it saved.
  std::vector<std::string> saved_in(const std::string& out) const {
    std::vector<std::string> all;
    const std::regex saved("(" + checkpoints() + "/[^:]*): [^\n]* a rank in");
    for (std::sregex_iterator at(out.begin(), out.end(), saved), end; at != end; ++at)
      all.push_back((*at)[1]);
    return all;
  }
  /// Every one that is whole, by what it says of itself.
  std::vector<Checkpoint> all() const {
    std::vector<Checkpoint> found;
    if (!fs::exists(checkpoints())) return found;
    for (const auto& entry : fs::directory_iterator(checkpoints())) {
      if (!fs::exists(entry.path() / "manifest.json")) continue;
      if (const auto its = checkpoint_in(entry.path())) found.push_back(*its);
    }
    return found;
  }
  std::optional<Checkpoint> newest_of(const std::string& line) const {
    std::optional<Checkpoint> newest;
    for (const Checkpoint& its : all()) {
      if (its.line == line && !damaged_.contains(its.directory) &&
          (!newest || its.step > newest->step))
        newest = its;
    }
    return newest;
  }
  std::string line_of_last() const { return last_line_; }

  void lose_store(const std::string& name) {
    for (const auto& entry : fs::directory_iterator(store(name)))
      if (entry.path().extension() == ".ziggurat") damage(entry.path());
  }
  void damage_checkpoint(const Checkpoint& its) {
    for (const auto& entry : fs::directory_iterator(its.directory))
      if (entry.path().extension() == ".safetensors") damage(entry.path());
    damaged_.insert(its.directory);
    for (auto& [line, newest] : newest_)
      if (newest.directory == its.directory) newest = newest_of(line).value_or(Checkpoint{});
  }

  /// What holds after every life. One that was killed may have saved more than it said, of `line`,
  /// and let go what it said.
  void judge(const Output& output, const Arguments& more, const std::string& line = "") {
    const std::vector<std::string> saved = saved_in(output.out);
    for (const std::string& directory : saved) damaged_.erase(directory);
    if (!saved.empty()) {
      const auto last = line.empty() ? checkpoint_in(saved.back()) : newest_of(line);
      if (!last || last->step < step_of(saved.back())) {
        ADD_FAILURE() << saved.back() << " was just saved, and is gone:\n" << output.out;
        return;
      }
      last_line_ = last->line;
      newest_[last->line] = *last;
    }
    for (const auto& [known, newest] : newest_) {
      if (newest.directory.empty()) continue;
      const auto its = checkpoint_in(newest.directory);
      EXPECT_TRUE(its && its->line == known && its->step >= newest.step)
          << newest.directory << ", the newest of line " << known << ", is gone:\n"
          << output.out << output.err;
    }
    const bool other = std::ranges::find(more, "--seed") != more.end();
    const std::map<int, std::string>& right = reference(other);
    for (const auto& [step, bits] : loss_bits(output.out)) {
      if (!right.contains(step)) continue;
      EXPECT_EQ(bits, right.at(step)) << "step " << step;
    }
  }
  void verify() {
    for (const auto& [line, newest] : newest_) {
      if (newest.directory.empty()) continue;
      const Output output = ziggurat(folder_.path(), {"ckpt", "verify", newest.directory});
      EXPECT_EQ(output.exit_code, 0) << output.err;
    }
  }

 private:
  /// The losses of a run that never went back.
  static const std::map<int, std::string>& reference(bool other) {
    static const auto run = [](const Arguments& more) {
      const TemporaryFolder folder;
      const Output output =
          ziggurat(folder.path(), tiny_train(folder, "reference", kReferenceSteps) + more);
      EXPECT_EQ(output.exit_code, 0) << output.err;
      return loss_bits(output.out);
    };
    static const std::map<int, std::string> first = run({});
    static const std::map<int, std::string> second = run({"--seed", "5"});
    return other ? second : first;
  }

  TemporaryFolder folder_;
  std::mt19937_64 random_;
  std::string every_;
  Arguments retention_;
  std::map<std::string, Checkpoint> newest_;  // by line, as lives said and damage left it
  std::set<std::string> damaged_;
  std::string last_line_;
};

void expect_resumed_at(int step, const Output& output) {
  EXPECT_EQ(output.exit_code, 0) << output.err;
  EXPECT_EQ(resumed_at(output), step) << output.out << output.err;
}

/// An older checkpoint is loaded into a store of its own; that is killed, goes on, and is lost.
void roll_back_then_kill(Lives& lives) {
  lives.live("a", lives.pick(6, 10));
  const std::vector<Checkpoint> all = lives.all();
  const Checkpoint back =
      all[static_cast<std::size_t>(lives.pick(0, static_cast<int>(all.size()) - 1))];
  const Arguments load{"--load", back.directory};
  const Output first = lives.die("b", lives.pick(1, 3), load);
  EXPECT_EQ(resumed_at(first), back.step) << first.out;
  const std::string line = lives.line_of_last();
  EXPECT_NE(line, back.line) << "it left that one";
  const auto saved = lives.newest_of(line);
  ASSERT_TRUE(saved);
  const Output second = lives.live("b", saved->step + 40, load);
  EXPECT_EQ(second.exit_code, 0) << second.err;
  EXPECT_GE(resumed_at(second).value_or(-1), saved->step) << second.out;
  EXPECT_EQ(lives.line_of_last(), line);
  fs::remove_all(lives.store("b"));
  const int newest1 = lives.newest_of(line)->step;  // before that life
  expect_resumed_at(newest1, lives.live("b", saved->step + 43));
  EXPECT_EQ(lives.line_of_last(), line) << "the store was lost, and not the line left";
}

void lose_the_store(Lives& lives) {
  lives.die("a", lives.pick(1, 4));
  const std::string line = lives.line_of_last();
  for (int time = 0; time < 2; ++time) {
    const auto newest = lives.newest_of(line);
    ASSERT_TRUE(newest);
    lives.lose_store("a");
    expect_resumed_at(newest->step, lives.live("a", newest->step + lives.pick(1, 6)));
    EXPECT_EQ(lives.line_of_last(), line);
  }
}

void lose_the_store_and_the_newest_checkpoint(Lives& lives) {
  lives.die("a", lives.pick(2, 5));
  const std::string line = lives.line_of_last();
  const auto newest = lives.newest_of(line);
  ASSERT_TRUE(newest);
  lives.damage_checkpoint(*newest);
  lives.lose_store("a");
  const auto older = lives.newest_of(line);
  const Output next = lives.live("a", newest->step + lives.pick(1, 6));
  EXPECT_THAT(next.out, HasSubstr("does not verify and is passed over"));
  if (!older) {
    EXPECT_EQ(next.exit_code, 1);
    EXPECT_THAT(next.err, HasSubstr("none of the checkpoints in "));
    EXPECT_TRUE(fs::exists(newest->directory + "/manifest.json"));
    return;
  }
  expect_resumed_at(older->step, next);
  const std::string child = lives.line_of_last();
  lives.lose_store("a");
  const auto last = lives.newest_of(child);
  ASSERT_TRUE(last);
  expect_resumed_at(last->step, lives.live("a", last->step + 3));
}

void begin_anew_in_the_same_folder(Lives& lives) {
  lives.live("a", lives.pick(6, 10));
  const Output anew = lives.die("a", lives.pick(1, 2), {"--resume", "never"});
  EXPECT_TRUE(loss_bits(anew.out).contains(1)) << anew.out;
  const std::string line = lives.line_of_last();
  const auto saved = lives.newest_of(line);
  ASSERT_TRUE(saved);
  const Output next = lives.live("a", saved->step + 40);
  EXPECT_GE(resumed_at(next).value_or(-1), saved->step) << next.out;
  EXPECT_EQ(lives.line_of_last(), line);
  // Without a store nothing says which of the two goes on.
  fs::remove_all(lives.store("a"));
  const Output neither = lives.live("a", saved->step + 43);
  EXPECT_EQ(neither.exit_code, 1);
  EXPECT_THAT(neither.err, AllOf(HasSubstr("several lines of this run"), HasSubstr("--load")));
}

void share_the_folder(Lives& lives) {
  const Arguments other{"--seed", "5"};
  const int steps = lives.pick(12, 30);
  Output first;
  {
    Process beside = lives.start("b", steps, other);
    first = lives.live("a", steps);
    lives.judge(beside.wait(), other);
  }
  lives.live("a", steps + 2);
  const std::string line_a = lives.line_of_last();
  lives.live("b", steps + 2, other);
  const std::string line_b = lives.line_of_last();
  EXPECT_NE(line_a, line_b);
  lives.lose_store("b");
  const int newest2 = lives.newest_of(line_b)->step;  // before that life
  expect_resumed_at(newest2, lives.live("b", steps + 5, other));
  fs::remove_all(lives.store("a"));
  const int newest3 = lives.newest_of(line_a)->step;  // before that life
  expect_resumed_at(newest3, lives.live("a", steps + 5));
}

void keep_the_state_in_memory(Lives& lives) {
  const Arguments host{"--placement", "optimizer=host"};
  lives.die("a", lives.pick(1, 4), host);
  const std::string line = lives.line_of_last();
  const auto newest = lives.newest_of(line);
  ASSERT_TRUE(newest);
  const Output next = lives.die("a", lives.pick(1, 2), host);
  EXPECT_EQ(resumed_at(next), newest->step) << next.out;
  EXPECT_THAT(next.out, HasSubstr("a newer state of the same line"));
  EXPECT_EQ(lives.line_of_last(), line);
  const auto last = lives.newest_of(line);
  expect_resumed_at(last->step, lives.live("a", last->step + 4, host));
}

struct Way {
  const char* name;
  void (*go)(Lives& lives);
};
class CliLines : public ::testing::TestWithParam<Way> {};

TEST_P(CliLines, AreGoneOnWithAndKeptApart) {
  constexpr std::uint64_t kWays = 6;
  const char* const wanted = std::getenv("ZIGGURAT_SEEDS");
  const std::uint64_t runs =
      wanted == nullptr ? 1 : (std::strtoull(wanted, nullptr, 10) + kWays - 1) / kWays;
  std::uint64_t done = 0;
  for (; done < runs && !HasFailure(); ++done) {
    const std::uint64_t seed = wanted == nullptr ? std::random_device{}() : done;
    SCOPED_TRACE("seed " + std::to_string(seed));
    Lives lives(seed);
    GetParam().go(lives);
    lives.verify();
  }
  std::printf("%s: %llu runs\n", GetParam().name, static_cast<unsigned long long>(done));
}

INSTANTIATE_TEST_SUITE_P(Ways, CliLines,
                         ::testing::Values(Way{"rolled_back_then_killed", roll_back_then_kill},
                                           Way{"store_lost", lose_the_store},
                                           Way{"newest_checkpoint_damaged",
                                               lose_the_store_and_the_newest_checkpoint},
                                           Way{"begun_anew", begin_anew_in_the_same_folder},
                                           Way{"two_runs_in_a_folder", share_the_folder},
                                           Way{"state_in_memory", keep_the_state_in_memory}),
                         [](const auto& way) { return std::string(way.param.name); });

}  // namespace
}  // namespace ziggurat::test
