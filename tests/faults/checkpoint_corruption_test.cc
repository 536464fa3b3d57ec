// SPDX-License-Identifier: Apache-2.0
// tests/faults/checkpoint_corruption_test.cc: damage of every kind to checkpoints and stores of
// several ranks and formats, each case by its seed: found and named, or the right bits.
//
// ZIGGURAT_CORRUPTIONS=1000000 runs that many cases in place of the gate's, from ZIGGURAT_SEED on,
// and prints what came of them as a table.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <iostream>
#include <map>

#include "tests/faults/corruption_judge.h"

namespace ziggurat::faults {
namespace {

constexpr std::uint64_t kGateCases = 6000;
constexpr int kFindingsMax = 20;

std::uint64_t setting(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

std::vector<SavedState> saved_states() {
  std::vector<SavedState> states;
  states.push_back(saved_checkpoints({.name = "checkpoint, 2 ranks, fp32", .ranks = 2}));
  states.push_back(saved_checkpoints(
      {.name = "checkpoint, 3 ranks, 8bit", .ranks = 3, .format = StateFormat::k8Bit}));
  states.push_back(
      saved_checkpoints({.name = "checkpoint, 1 rank, bf16", .format = StateFormat::kBf16}));
  states.push_back(saved_store({.name = "store, 2 ranks, fp32", .ranks = 2}));
  states.push_back(saved_store({.name = "store, 1 rank, 8bit", .format = StateFormat::k8Bit}));
  states.push_back(saved_store(
      {.name = "store, 1 rank, split, 2 stripes", .format = StateFormat::kSplit, .stripes = 2}));
  return states;
}

/// Counts by what was damaged and how.
class Tally {
 public:
  void add(const SavedState& state, const Damage& damage, Verdict verdict) {
    const std::string place = fmt::format("{} | {} | {}", state.is_store ? "store" : "checkpoint",
                                          damage.what, to_string(damage.kind));
    ++counts_[place][static_cast<std::size_t>(verdict)];
    ++all_[static_cast<std::size_t>(verdict)];
  }
  std::uint64_t count(Verdict verdict) const { return all_[static_cast<std::size_t>(verdict)]; }
  void print() const {
    std::cout << "| state | where it began | damage |";
    for (int v = 1; v < kVerdicts; ++v)
      std::cout << ' ' << to_string(static_cast<Verdict>(v)) << " |";
    std::cout << '\n';
    for (const auto& [place, counts] : counts_) {
      std::cout << "| " << place << " |";
      for (int v = 1; v < kVerdicts; ++v)
        std::cout << ' ' << counts[static_cast<std::size_t>(v)] << " |";
      std::cout << '\n';
    }
  }

 private:
  using Counts = std::array<std::uint64_t, kVerdicts>;
  std::map<std::string, Counts> counts_;
  Counts all_{};
};

TEST(CheckpointCorruption, IsNamedOrHarmless) {
  const std::uint64_t cases = setting("ZIGGURAT_CORRUPTIONS", kGateCases);
  const std::uint64_t first = setting("ZIGGURAT_SEED", 20261124);
  const std::vector<SavedState> states = saved_states();
  std::vector<Files> files;
  for (const SavedState& state : states) files.push_back(state.now);
  Judge judge;
  Tally tally;
  std::uint64_t judged = 0;
  for (std::uint64_t seed = first; judged < cases; ++seed) {
    const std::size_t which = seed % states.size();
    std::mt19937_64 random(seed);
    const Damage damaged = damage(states[which], files[which], random);
    std::string why;
    const Verdict verdict = judge.judge(states[which], files[which], damaged, why);
    mend(states[which], files[which], damaged);
    tally.add(states[which], damaged, verdict);
    if (verdict == Verdict::kUnchanged) continue;
    ++judged;
    if (verdict != Verdict::kFinding) continue;
    ADD_FAILURE() << "seed " << seed << ": " << damaged.description << "\n  " << why;
    if (tally.count(Verdict::kFinding) == kFindingsMax) break;
  }
  std::cout << judged << " cases, " << tally.count(Verdict::kUnchanged)
            << " drawn that changed nothing, " << tally.count(Verdict::kFinding) << " findings\n";
  if (std::getenv("ZIGGURAT_CORRUPTIONS") != nullptr) tally.print();
  // A campaign that only ever meets one kind of end has gone blind.
  for (const Verdict verdict : {Verdict::kRefused, Verdict::kTensorNamed, Verdict::kFoundByVerify,
                                Verdict::kFellBack, Verdict::kHarmlessSaid, Verdict::kHarmless})
    EXPECT_TRUE(cases < kGateCases || tally.count(verdict) > 0) << to_string(verdict);
}

}  // namespace
}  // namespace ziggurat::faults
