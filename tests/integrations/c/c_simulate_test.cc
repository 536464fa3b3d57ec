// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/c_simulate_test.cc: a step that an embedder has recorded is played on this
// machine as its profile says that it is.
#include <gmock/gmock.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "tests/integrations/c/embedder.h"

namespace ziggurat::testing {
namespace c_simulate_test {

using nlohmann::json;

/// A profile of a machine with two cores, on which AdamW passes over 1 GB a second.
constexpr const char* kMeasured = R"({"ziggurat_profile": 1,
  "machine": {"cpu_model": "a", "kernel": "b", "host_adam_gb_per_s": 1.0}, "drives": [],
  "compute": {"measured_at": "2026-01-01T00:00:00Z", "threads": 2, "layer_gflop_per_s": 1.0,
    "attention_gflop_per_s": 1.0, "pass_gb_per_s": 1.0, "copy_gb_per_s": 1.0,
    "unaligned_gflop_per_s": 1.0}})";

class CSimulate : public Embedder {
 protected:
  void SetUp() override {
    Embedder::SetUp();
    if (const char* const before = std::getenv(kVariable)) before_ = before;
    setenv(kVariable, directory_.path().c_str(), 1);
  }
  void TearDown() override {
    if (before_) {
      setenv(kVariable, before_->c_str(), 1);
    } else {
      unsetenv(kVariable);
    }
    Embedder::TearDown();
  }

  void measure() const {
    std::filesystem::create_directory(directory_.path() + "/ziggurat");
    std::ofstream(directory_.path() + "/ziggurat/profile.json") << kMeasured;
  }
  ziggurat_status simulate(const std::string& recording, const std::string& its = kHeld) {
    return ziggurat_simulate(params_.data(), params_.size(), its.c_str(), recording.c_str(),
                             text_.data(), text_.size(), nullptr);
  }
  static constexpr const char* kHeld = R"({"placement": "optimizer=host"})";
  json answer() const { return json::parse(text_.data()); }

  std::array<char, 4096> text_{};

 private:
  static constexpr const char* kVariable = "XDG_CONFIG_HOME";
  std::optional<std::string> before_;
};

constexpr const char* kStep = R"({"update_at_once": true, "events": [
  ["wait", 0], ["wait", 1], ["compute", 0.25], ["compute", 0.5, 1],
  ["gradient", 1], ["gradient", 0], ["step"]]})";

TEST_F(CSimulate, SaysHowLongAStepTakes) {
  measure();
  ASSERT_DONE(simulate(kStep));
  const json its = answer();
  EXPECT_NEAR(its["compute_s"], 0.75, 1e-6);
  EXPECT_EQ(its["workers"], 2);
  // 40,105 elements in fp32, of which one worker updates most.
  EXPECT_GT(its["step_s"], 32 * 40'105 / 1e9);
  EXPECT_LT(its["step_s"], 4 * 32 * 40'105 / 1e9);
  EXPECT_NEAR(its["seconds"].get<double>(), 0.75 + its["step_s"].get<double>(), 1e-4);
  EXPECT_EQ(its["written_bytes"], 0);
}

TEST_F(CSimulate, PlaysTheStoresDrive) {
  measure();
  const std::string on_drive = settings(R"(, "placement": "optimizer=nvme")");
  EXPECT_REFUSED(simulate(kStep, on_drive), "has not been measured");
  std::string slow = kStep;
  slow.insert(1, R"("drive_bytes_per_s": 1e5, )");
  ASSERT_DONE(simulate(slow, on_drive));
  const json its = answer();
  EXPECT_GT(its["written_bytes"], 8 * 40'105);
  EXPECT_GT(its["seconds"].get<double>(), 0.9 * its["drive_busy_s"].get<double>());
  EXPECT_FALSE(std::filesystem::exists(directory_.path() + "/store"));
}

TEST_F(CSimulate, HasAsManyWorkersAsTheRuntime) {
  measure();
  ASSERT_DONE(simulate(kStep));
  const json two = answer();
  std::string alone = kStep;
  alone.insert(1, R"("threads": 1, )");
  ASSERT_DONE(simulate(alone));
  const json one = answer();
  EXPECT_EQ(one["workers"], 1);
  // Its rate is half of two workers', which share the larger parameter.
  EXPECT_GT(one["step_s"], two["step_s"]);
  EXPECT_NEAR(one["update_busy_s"].get<double>(), 2 * two["update_busy_s"].get<double>(), 1e-4);
  // More workers than cores take their part of the same memory.
  std::string many = kStep;
  many.insert(1, R"("threads": 8, )");
  ASSERT_DONE(simulate(many));
  EXPECT_NEAR(answer()["step_s"].get<double>(), two["step_s"].get<double>(), 2e-4);
}

TEST_F(CSimulate, SaysWhatIsWrong) {
  EXPECT_REFUSED(simulate(kStep), "this machine has not been measured");
  measure();
  EXPECT_REFUSED(simulate("[]"), "a JSON object with an array \"events\"");
  EXPECT_REFUSED(simulate(R"({"events": []})"), "of a step makes 0 of them: give one");
  EXPECT_REFUSED(simulate(R"({"events": [["leap", 1]]})"), "unknown event \"leap\"");
  EXPECT_REFUSED(simulate(R"({"events": [["step", 1]]})"), "an event \"step\" has 1 values");
  EXPECT_REFUSED(simulate(R"({"events": [["compute", -1], ["step"]]})"), "seconds from 0 on");
  EXPECT_REFUSED(simulate(R"({"events": [["wait", 2], ["step"]]})"), "parameter 2");
  EXPECT_REFUSED(simulate(R"({"events": [["acquire", 0], ["step"]]})"), "there are no units");
  EXPECT_REFUSED(simulate(R"({"events": [["step"]], "event": 1})"), "unknown key \"event\"");
  EXPECT_REFUSED(simulate(R"({"events": [["step"]], "update_at_once": 1})"), "true or false");
  EXPECT_REFUSED(simulate(R"({"events": [["step"]], "drive_bytes_per_s": 999})"), "at least 1000");
  EXPECT_REFUSED(simulate(R"({"events": [["step"]], "threads": 0})"), "from 1 to");
}

}  // namespace c_simulate_test
}  // namespace ziggurat::testing
