// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/deepspeed_test.cc: a config for DeepSpeed through the C interface.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "integrations/c/ziggurat.h"

namespace deepspeed_test {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* kTwoRanks = R"({"world_size": 2, "settings": ["host_memory"]})";

json read(const char* config, const char* context = kTwoRanks) {
  std::uint64_t needed = 0;
  EXPECT_EQ(ziggurat_deepspeed_config(config, "ds.json", context, nullptr, 0, &needed), ZIGGURAT_OK)
      << ziggurat_last_error();
  std::vector<char> text(needed);
  EXPECT_EQ(
      ziggurat_deepspeed_config(config, "ds.json", context, text.data(), text.size(), nullptr),
      ZIGGURAT_OK);
  return json::parse(text.data());
}

std::string refusal(const char* config, const char* context = kTwoRanks) {
  EXPECT_EQ(ziggurat_deepspeed_config(config, "ds.json", context, nullptr, 0, nullptr),
            ZIGGURAT_INVALID_ARGUMENT);
  return ziggurat_last_error();
}

TEST(DeepSpeedInC, SettingsHandedKeysAndNotesAreOneObject) {
  const json its = read(R"({"train_batch_size": 8, "steps_per_print": 5, "host_memory": "2GiB",
      "timers": {}, "zero_optimization": {"stage3_max_live_parameters": 1e6, "sub_group_size": 1}})");
  EXPECT_EQ(its["settings"]["batch"],
            json::parse(R"({"value": 4, "path": "train_batch_size", "assumed": false})"));
  EXPECT_EQ(its["settings"]["clip"]["assumed"], true);
  EXPECT_EQ(its["settings"]["host_memory"]["value"], "2GiB");
  EXPECT_EQ(its["settings"]["max_live_parameters"]["path"],
            "zero_optimization.stage3_max_live_parameters");
  EXPECT_EQ(its["handed"]["steps_per_print"]["value"], 5);
  EXPECT_EQ(its["handed"]["csv_monitor.job_name"]["value"], "DeepSpeedJobName");
  EXPECT_EQ(its["given"]["timers"], json::object());
  EXPECT_THAT(its["notes"].dump(), AllOf(HasSubstr("timers"), HasSubstr("sub_group_size")));
}

TEST(DeepSpeedInC, AValueIsJudgedByTheEnginesTableBeforeThereIsAnEngine) {
  EXPECT_THAT(refusal(R"({"train_batch_size": 2, "zero_optimization": {"stage": 5}})"),
              AllOf(HasSubstr("ds.json: \"zero_optimization.stage\" 5"), HasSubstr("0 to 3")));
  EXPECT_THAT(refusal(R"({"train_batch_size": 2, "gradient_clipping": "much"})"),
              HasSubstr("\"gradient_clipping\" \"much\": it must be a number"));
}

TEST(DeepSpeedInC, AContextThatIsNoneIsRefused) {
  for (const char* context : {"", "[]", R"({"world_size": 0})", R"({"settings": [1]})"})
    EXPECT_THAT(refusal("{}", context), HasSubstr("context must be JSON")) << context;
  EXPECT_THAT(refusal(nullptr), HasSubstr("config is null"));
}

}  // namespace deepspeed_test
