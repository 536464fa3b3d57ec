// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/c_reshard_test.cc: a store is divided anew among other ranks through
// libziggurat.so: values, counts of steps, the blob of rank 0, and what says whose it is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "integrations/c/ziggurat.hpp"
#include "tests/integrations/c/on_ranks.h"
#include "tests/support/scratch_directory.h"

namespace c_reshard_test {

using ::testing::HasSubstr;
using ziggurat::testing::on_ranks;

constexpr std::uint64_t kCount = 40'000;  // elements of "weight"; "bias" has 5

/// What a rank of `ranks` has: a slice of "weight" and, on the last rank, "bias".
struct Trainer {
  Trainer(int rank, int ranks) {
    const auto at = static_cast<std::uint64_t>(rank);
    const auto of = static_cast<std::uint64_t>(ranks);
    first = at * kCount / of;
    weight.resize((at + 1) * kCount / of - first);
    if (rank + 1 == ranks) bias.resize(5);
    for (std::size_t i = 0; i < weight.size(); ++i)
      weight[i] = static_cast<float>((first + i) % 1009) * 0.01F;
    gradient = weight;
    bias_gradient.assign(bias.size(), 0.5F);
  }
  std::vector<ziggurat::Param> params() {
    std::vector<ziggurat::Param> all{
        {"weight", {static_cast<std::int64_t>(weight.size())}, ziggurat::memory_of(weight)}};
    if (!bias.empty()) all.push_back({"bias", {5}, ziggurat::memory_of(bias)});
    return all;
  }
  std::string settings(const std::string& store, const std::string& resume) const {
    std::string pieces =
        R"([{"name": "weight", "shape": [200, 200], "first": )" + std::to_string(first) + "}";
    if (!bias.empty()) pieces += R"(, {"name": "bias", "shape": [5], "offsets": [0], "box": [5]})";
    return R"({"store": ")" + store + R"(", "resume": ")" + resume + R"(", "pieces": )" + pieces +
           "]}";
  }
  void step(ziggurat::Engine& engine, bool with_bias, const std::string& blob) {
    auto adamw = ZIGGURAT_INIT(ziggurat_group);
    adamw.learning_rate = 0.05F, adamw.beta1 = 0.9F, adamw.beta2 = 0.99F, adamw.eps = 1e-8F;
    engine.lend_gradient(0, ziggurat::memory_of(gradient));
    if (with_bias && !bias.empty()) engine.lend_gradient(1, ziggurat::memory_of(bias_gradient));
    engine.step({adamw}, 1, blob);
    engine.wait();
  }

  std::uint64_t first = 0;
  std::vector<float> weight, bias, gradient, bias_gradient;
};

/// The whole parameters of all ranks, and counts of steps.
struct Whole {
  std::vector<float> weight = std::vector<float>(kCount);
  std::vector<float> bias;
  std::map<std::string, std::uint64_t> steps;
  friend bool operator==(const Whole&, const Whole&) = default;
};

class CReshard : public ::testing::Test {
 protected:
  Whole on(int ranks, const std::string& resume, int steps, std::uint64_t blob_ranks) const {
    Whole all;
    std::mutex mutex;
    on_ranks(ranks, [&](int rank, const ziggurat::Runtime& runtime) {
      Trainer trainer(rank, ranks);
      ziggurat::Engine engine(runtime, trainer.params(),
                              trainer.settings(scratch_.path() + "/store", resume));
      EXPECT_EQ(engine.state().blob_ranks, blob_ranks);
      if (blob_ranks > 0) {
        EXPECT_EQ(engine.blob(), "of rank 0");
      }
      for (int step = 0; step < steps; ++step)
        trainer.step(engine, step == 0, "of rank " + std::to_string(rank));
      engine.make_durable();
      const std::lock_guard lock(mutex);
      std::ranges::copy(trainer.weight, all.weight.begin() + static_cast<long>(trainer.first));
      all.steps["weight"] = engine.steps_of(0);
      if (trainer.bias.empty()) return;
      all.bias = trainer.bias;
      all.steps["bias"] = engine.steps_of(1);
    });
    return all;
  }
  const ziggurat::testing::ScratchDirectory scratch_;
};

TEST_F(CReshard, AmongOtherRanksKeepsValuesAndCounts) {
  const Whole first = on(2, "auto", 3, 0);
  EXPECT_EQ(first.steps.at("weight"), 3U);
  EXPECT_EQ(first.steps.at("bias"), 1U);
  EXPECT_EQ(on(3, "reshard", 0, 2), first);
  EXPECT_EQ(on(3, "auto", 0, 2), first);     // no step was made since
  EXPECT_EQ(on(1, "reshard", 0, 2), first);  // it is still the blob of the first ranks
  const Whole next = on(1, "auto", 1, 2);
  EXPECT_EQ(next.steps.at("bias"), 2U);
  EXPECT_EQ(on(1, "reshard", 0, 0), next);  // nothing differs
}

TEST_F(CReshard, IsNamedInTheRefusalOfOtherRanks) {
  on(2, "auto", 1, 0);
  on_ranks(1, [&](int rank, const ziggurat::Runtime& runtime) {
    Trainer trainer(rank, 1);
    try {
      ziggurat::Engine(runtime, trainer.params(),
                       trainer.settings(scratch_.path() + "/store", "auto"));
      ADD_FAILURE() << "opened";
    } catch (const ziggurat::Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(R"("resume": "reshard")"));
    }
  });
}

TEST_F(CReshard, OfPiecesThatLieNowhereIsRefused) {
  on_ranks(1, [&](int rank, const ziggurat::Runtime& runtime) {
    Trainer trainer(rank, 1);
    const auto refused = [&](const std::string& pieces) {
      const std::string settings =
          R"({"store": ")" + scratch_.path() + R"(/store", "pieces": )" + pieces + "}";
      try {
        ziggurat::Engine(runtime, trainer.params(), settings);
      } catch (const ziggurat::Error& error) {
        EXPECT_EQ(error.status(), ZIGGURAT_INVALID_ARGUMENT);
        return std::string(error.what());
      }
      return std::string("taken");
    };
    EXPECT_THAT(refused("[null]"), HasSubstr("1 places, but 2 parameters are not frozen"));
    EXPECT_THAT(refused("7"), HasSubstr("must be a list"));
    EXPECT_THAT(refused(R"([{"name": "weight"}, null])"), HasSubstr("place 0"));
    EXPECT_THAT(refused(R"([{"name": "", "shape": [1], "first": 0}, null])"), HasSubstr("no name"));
    EXPECT_THAT(refused(R"([{"name": "weight", "shape": [200, 200], "first": 1}, null])"),
                HasSubstr("parameter 'weight' cannot be that part of 'weight'"));
    EXPECT_EQ(refused(R"([{"name": "weight", "shape": [200, 200], "first": 0}, null])"), "taken");
  });
}

}  // namespace c_reshard_test
