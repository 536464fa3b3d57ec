// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/c_words_test.cc: what the engine's messages advise, in what a C program has:
// every word that a source of the library quotes goes through it.
#include "integrations/c/c_words.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include "core/engine/engine_settings.h"

namespace ziggurat::testing {
namespace c_words_test {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

struct Message {
  std::string where;
  std::string text;
};

std::string read_text(const fs::path& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

/// Every string of the sources of libziggurat.so that has a word in backticks.
const std::vector<Message>& messages() {
  static const std::vector<Message> all = [] {
    static const std::regex kComment("//[^\n]*");
    static const std::regex kGoesOn("\"\\s*\n\\s*\"");
    static const std::regex kString(R"re("((?:[^"\\\n]|\\.)*)")re");
    std::vector<Message> found;
    for (const char* const folder : {"base", "aio", "tiers", "optimizer", "collectives", "core",
                                     "integrations/c", "integrations/deepspeed"}) {
      for (const auto& entry :
           fs::recursive_directory_iterator(fs::path(ZIGGURAT_SOURCE_DIR) / folder)) {
        const std::string extension = entry.path().extension();
        if (extension != ".cc" && extension != ".h" && extension != ".cu") continue;
        std::string source = std::regex_replace(read_text(entry.path()), kComment, "");
        source = std::regex_replace(source, kGoesOn, "");
        for (auto at = std::sregex_iterator(source.begin(), source.end(), kString);
             at != std::sregex_iterator(); ++at) {
          const std::string text = (*at)[1];
          if (std::ranges::count(text, '`') >= 2)
            found.push_back({.where = entry.path().filename(), .text = text});
        }
      }
    }
    return found;
  }();
  return all;
}

std::vector<std::string> quoted(const std::string& text) {
  std::vector<std::string> words;
  static const std::regex kQuoted("`([^`]*)`");
  for (auto at = std::sregex_iterator(text.begin(), text.end(), kQuoted);
       at != std::sregex_iterator(); ++at)
    words.push_back((*at)[1]);
  return words;
}

/// A command, a name that is filled in, or a key of DeepSpeed's config, which its script has.
bool is_setting(const std::string& word) {
  static const std::set<std::string> keys{
      "communication_data_type", "csv_monitor", "intra_op_parallelism", "tensorboard", "wandb",
      "wall_clock_breakdown"};
  return !word.starts_with("ziggurat ") && !word.starts_with("ulimit ") && !word.starts_with("{") &&
         !keys.contains(word);
}

TEST(CWords, AreKnownForEverySettingThatASourceNames) {
  std::size_t seen = 0;
  for (const Message& message : messages()) {
    for (const std::string& word : quoted(message.text)) {
      if (!is_setting(word)) continue;
      ++seen;
      EXPECT_TRUE(is_known_to_c(word.substr(0, word.find('=')))) << message.where << ": " << word;
    }
  }
  EXPECT_GT(seen, 60U);
}

TEST(CWords, AreKnownForEverySettingOfTheEngine) {
  for (const auto& setting : engine_settings())
    EXPECT_TRUE(is_known_to_c(setting.name)) << setting.name;
}

TEST(CWords, LeaveNothingInQuotesButCommandsAndOtherConfigsKeys) {
  for (const Message& message : messages()) {
    const std::string said = in_c(message.text);
    for (const std::string& word : quoted(said)) EXPECT_FALSE(is_setting(word)) << said;
    EXPECT_THAT(said, Not(HasSubstr("resume=reshard")));
  }
}

TEST(CWords, AreKeysOfTheSettingsOrTheCallThatTakesThem) {
  const std::vector<std::pair<std::string, std::string>> all{
      {"`store=/d`: there is a store already: give another directory, `resume=auto` to go on from "
       "it, or `resume=never` to replace it",
       "\"store\": \"/d\": there is a store already: give another directory, \"resume\": \"auto\" "
       "to go on from it, or \"resume\": \"never\" to replace it"},
      {"the store's state is adamw in fp32, this run's adam in fp32: give `optimizer=adamw` "
       "`state_format=fp32`, `resume=reshard` to convert a state of the same optimizer, another "
       "`store`, or `resume=never` to replace it",
       "the store's state is adamw in fp32, this run's adam in fp32: give \"optimizer\": \"adamw\" "
       "\"state_format\": \"fp32\", \"resume\": \"reshard\" to convert a state of the same "
       "optimizer, another \"store\", or \"resume\": \"never\" to replace it"},
      {"open it with `slots=1`", "open it with \"slots\": 1"},
      {"`clip=1`: too much; raise `lr`",
       "\"clip\": 1: too much; raise ziggurat_group.learning_rate"},
      {"it is 3: give `clip`",
       "it is 3: give ziggurat_gradient_norm() and ziggurat_step_options.grad_scale"},
      {"`zero_stage=3` needs `tp`", "\"zero_stage\": 3 needs \"tp\""},
      {"a GPU is missing; install one, or use `collectives=auto`", "a GPU is missing; install one"},
      {"it is 3: give `tp`", "it is 3"},
      {"it is 3: give `tp`, or `slots`", "it is 3: give \"slots\""},
      {"see `ziggurat plan`", "see `ziggurat plan`"},
      {"a quote ` alone", "a quote ` alone"},
      {"", ""}};
  for (const auto& [message, said] : all) EXPECT_EQ(in_c(message), said);
}

}  // namespace c_words_test
}  // namespace ziggurat::testing
