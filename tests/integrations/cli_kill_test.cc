// SPDX-License-Identifier: Apache-2.0
// tests/integrations/cli_kill_test.cc: SIGKILL at random moments, from the first write to the last:
// every relaunch goes on, and the end has the bits of the run that was never killed.
//
// SIGKILL does not test fdatasync, since the kernel keeps the page cache; the simulated disk in
// tests/faults does. ZIGGURAT_KILLS: kills of each setting (25).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <random>
#include <thread>

#include "tests/integrations/cli_process.h"

namespace ziggurat::test {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSteps = 40;

int kills_wanted() {
  const char* const wanted = std::getenv("ZIGGURAT_KILLS");
  return wanted != nullptr ? std::atoi(wanted) : 25;
}

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// What the files say at the end: the exported masters of the last generation.
std::string weights(const TemporaryFolder& folder, const std::string& store) {
  const std::string file = folder / (store + ".safetensors");
  const Output output =
      ziggurat(folder.path(), {"export", "--store", folder / store, "--to", file, "--force"});
  EXPECT_EQ(output.exit_code, 0) << output.err;
  return contents(file);
}

/// By step, or by attempt where a loss scale has steps skipped.
std::map<int, std::string> bits_of(const std::string& out) {
  std::map<int, std::string> bits = loss_bits(out);
  bits.merge(attempt_bits(out));
  return bits;
}

/// Steps from one that becomes durable to the next.
int durable_every(const Arguments& arguments) {
  const auto flag = std::ranges::find(arguments, "--durable-every-steps");
  return flag == arguments.end() ? 1 : std::stoi(*std::next(flag));
}

class CliKill : public testing::TestWithParam<Arguments> {};

TEST_P(CliKill, AtRandomMomentsLosesNoFinishedStep) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const TemporaryFolder folder;
  const Arguments& more = GetParam();

  const Clock::time_point begin = Clock::now();
  const Output whole = ziggurat(folder.path(), tiny_train(folder, "whole", kSteps) + more);
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  const double whole_s = seconds_since(begin);
  const auto expected = bits_of(whole.out);
  ASSERT_GE(expected.size(), static_cast<std::size_t>(kSteps));

  // Delays span a whole run, so that kills fall into opening, filling, stepping, sealing and
  // ending. A run that ends before its kill is replaced by a new one, which begins at the filling
  // of a new store.
  std::map<int, std::string> seen;
  std::uniform_real_distribution<double> delay(0, 0.6 * whole_s);
  int kills = 0;
  int previous_resume = 0;
  int previous_last = 0;
  while (kills < kills_wanted()) {
    Process process(folder.path(), tiny_train(folder, "killed", kSteps) + more);
    std::this_thread::sleep_for(std::chrono::duration<double>(delay(random)));
    process.signal(SIGKILL);
    const Output output = process.wait();
    int first = 0;
    for (const auto& [step, bits] : bits_of(output.out)) {
      if (first == 0) first = step;
      EXPECT_EQ(bits, expected.at(step)) << "step " << step << " after " << kills << " kills";
      seen[step] = bits;
    }
    if (output.signal == SIGKILL) {
      ++kills;
      if (first != 0) {
        // What was durable before stays durable: no relaunch goes back.
        EXPECT_GE(first, previous_resume);
        // When a step's line is printed, the second step before it is written, and the one before
        // that is done with.
        EXPECT_GE(first, previous_last - durable_every(more) - 1);
        previous_resume = first;
        const std::map<int, std::string> steps = loss_bits(output.out);
        previous_last = steps.empty() ? 0 : steps.rbegin()->first;
      }
      continue;
    }
    ASSERT_EQ(output.exit_code, 0) << "after " << kills << " kills: " << output.err;
    EXPECT_EQ(seen, expected);
    std::filesystem::remove_all(folder / "killed");
    seen.clear();
    previous_resume = 0;
    previous_last = 0;
  }
  const Output last = ziggurat(folder.path(), tiny_train(folder, "killed", kSteps) + more);
  ASSERT_EQ(last.exit_code, 0) << last.err;
  for (const auto& [step, bits] : bits_of(last.out)) {
    EXPECT_EQ(bits, expected.at(step)) << "step " << step << " in the last run";
    seen[step] = bits;
  }
  EXPECT_EQ(seen, expected);  // every step's line was flushed before its generation was sealed
  EXPECT_EQ(weights(folder, "killed"), weights(folder, "whole"));
}

const Arguments kDemo{"--placement", "params=host,grads=host,optimizer=nvme"};
const Arguments kNvme{"--placement", "all=nvme"};
/// Every step guesses, and about half of the guesses are wrong.
const Arguments kGuesses{"--speculate", "always", "--clip", "2.1", "--host-memory", "2MiB"};

/// Overflows at the start, and whenever the scale has grown back.
const Arguments kFp16{
    "--dtype",      "fp16", "--initial-scale-power", "22", "--loss-scale-window", "5",
    "--hysteresis", "1"};
const Arguments kEightBit{"--state-format", "8bit"};
const Arguments kSplit{"--state-format", "split"};
/// Records on all three tiers.
const Arguments kDivided{"--placement",
                         "params=host,grads=host,optimizer=device:700KiB,host:700KiB,nvme"};
const Arguments kLittle{"--host-memory", "2MiB"};
const Arguments kEveryFifth{"--durable-every-steps", "5"};

INSTANTIATE_TEST_SUITE_P(Settings, CliKill,
                         testing::Values(kDemo, kNvme, kDemo + kGuesses, kNvme + kGuesses,
                                         kDemo + kFp16, kNvme + kGuesses + kFp16,
                                         kDemo + kGuesses + kEightBit, kDemo + kGuesses + kSplit,
                                         kDivided + kLittle, kGuesses + kDivided + kEveryFifth));

TEST(CliKillOne, ASecondCtrlCAbortsAtOnceAndLosesNothing) {
  const TemporaryFolder folder;
  const Output whole = ziggurat(folder.path(), tiny_train(folder, "whole", 8));
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  // Its last checkpoint takes minutes.
  Process process(folder.path(), tiny_train(folder, "store", 100'000) +
                                     Arguments{"--checkpoint-dir", folder / "checkpoints",
                                               "--checkpoint-bandwidth", "2kB"});
  ASSERT_TRUE(process.wait_for_output("step 3 loss-bits")) << process.out() << process.err();
  process.signal(SIGINT);
  std::this_thread::sleep_for(std::chrono::milliseconds(1200));  // within a second it is the first
  process.signal(SIGTERM);
  const Output output = process.wait();
  EXPECT_EQ(output.exit_code, 130);
  EXPECT_THAT(output.err, testing::HasSubstr("aborted"));
  auto bits = loss_bits(output.out);
  const Output rest =
      ziggurat(folder.path(), tiny_train(folder, "store", std::max(8, bits.rbegin()->first + 1)));
  ASSERT_EQ(rest.exit_code, 0) << rest.err;
  for (const auto& [step, value] : loss_bits(rest.out)) bits[step] = value;
  for (const auto& [step, value] : loss_bits(whole.out)) EXPECT_EQ(bits.at(step), value) << step;
}

/// The last step whose loss is printed; the one before it has ended. 0: none is.
int last_step(const Process& process) {
  const auto bits = loss_bits(process.out());
  return bits.empty() ? 0 : bits.rbegin()->first;
}

/// Waits until this step or a later one has begun; false if that is not seen (Process::wait_until).
bool wait_for_step(const Process& process, int step) {
  return process.wait_until([&] { return last_step(process) >= step; });
}

// Machines are of all speeds: only the order of what the test saw counts. A step that had ended
// durable_every before another ended is stored by then, or at that one's end, beside the next.
TEST(CliKillOne, WithStateInMemoryGoesBackNoFurtherThanDurableEvery) {
  constexpr std::chrono::milliseconds kDurableEvery(200);
  const TemporaryFolder folder;
  const Arguments train = tiny_train(folder, "store", 100'000) +
                          Arguments{"--placement", "all=host", "--durable-every", "0.2"};
  std::map<int, std::string> seen;
  int surely_stored = 0;
  for (int kill = 0; kill < 4; ++kill) {
    Process process(folder.path(), train);
    const int stored_before = surely_stored;
    ASSERT_TRUE(wait_for_step(process, 3)) << process.err();
    surely_stored = last_step(process) - 1;
    std::this_thread::sleep_for(kDurableEvery);
    ASSERT_TRUE(wait_for_step(process, last_step(process) + 3)) << process.err();
    process.signal(SIGKILL);
    const Output output = process.wait();
    const auto bits = loss_bits(output.out);
    EXPECT_GT(bits.begin()->first, stored_before) << "after " << kill << " kills";
    for (const auto& [step, value] : bits) {
      EXPECT_EQ(seen.try_emplace(step, value).first->second, value) << "step " << step;
    }
  }
}

}  // namespace
}  // namespace ziggurat::test
