// SPDX-License-Identifier: Apache-2.0
// tests/integrations/cli_load_test.cc: loads of what is not quite this model: other names, more
// layers or fewer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "tests/integrations/cli_process.h"

namespace ziggurat::test {
namespace cli_load_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

using Tensors = std::map<std::string, std::string>;

Tensors tensors_of(const std::string& file) {
  const std::string bytes = contents(file);
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof(length));
  Tensors tensors;
  const nlohmann::json header = nlohmann::json::parse(bytes.substr(8, length));
  for (const auto& [name, tensor] : header.items()) {
    if (name == "__metadata__") continue;
    const auto begin = tensor.at("data_offsets").at(0).get<std::size_t>();
    const auto end = tensor.at("data_offsets").at(1).get<std::size_t>();
    tensors[name] = bytes.substr(8 + length + begin, end - begin);
  }
  return tensors;
}

class CliLoad : public ::testing::Test {
 protected:
  CliLoad() { EXPECT_EQ(train("saved", {"--seed", "7"}).exit_code, 0); }

  Output train(const std::string& store, const Arguments& more) {
    return ziggurat(folder_.path(), tiny_train(folder_, store, 1) + Arguments{"--lr", "0"} + more);
  }
  Output load(const std::string& store, const Arguments& more) {
    return train(store, Arguments{"--load", folder_ / "saved", "--load-weights"} + more);
  }
  Tensors weights(const std::string& store) {
    const std::string file = folder_ / (store + ".safetensors");
    EXPECT_EQ(
        ziggurat(folder_.path(), {"export", "--store", folder_ / store, "--to", file}).exit_code,
        0);
    return tensors_of(file);
  }

  TemporaryFolder folder_;
};

TEST_F(CliLoad, OfFewerLayersIsRefusedWithEveryNameOrKeepsInitialValues) {
  const Arguments three{"--model", "3x64x2"};
  const Output refused = load("three", three);
  EXPECT_EQ(refused.exit_code, 1);
  for (const char* name : {"h.2.attn.c_attn.weight", "h.2.mlp.c_proj.bias", "h.2.ln_1.weight"})
    EXPECT_THAT(refused.err, HasSubstr(std::string("'") + name + "'"));
  EXPECT_THAT(refused.err, Not(HasSubstr("h.1.")));
  const Output partial = load("three", three + Arguments{"--load-partial"});
  ASSERT_EQ(partial.exit_code, 0) << partial.err;
  EXPECT_THAT(partial.out, AllOf(HasSubstr("the source lacks 'h.2.attn.c_attn.bias'"),
                                 HasSubstr("which keep their initial values")));
  ASSERT_EQ(train("fresh", three).exit_code, 0);
  const Tensors saved = weights("saved");
  const Tensors fresh = weights("fresh");
  for (const auto& [name, bytes] : weights("three"))
    EXPECT_TRUE(bytes == (name.starts_with("h.2.") ? fresh : saved).at(name)) << name;
}

TEST_F(CliLoad, OfMoreLayersIsRefusedOrLeavesThemOut) {
  const Arguments one{"--model", "1x64x2"};
  const Output refused = load("one", one);
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_THAT(refused.err, AllOf(HasSubstr("this model lacks the source's 'h.1.attn.c_attn.bias'"),
                                 HasSubstr("'h.1.mlp.c_proj.weight'")));
  const Output partial = load("one", one + Arguments{"--load-partial"});
  ASSERT_EQ(partial.exit_code, 0) << partial.err;
  EXPECT_THAT(partial.out, HasSubstr("this model lacks the source's 'h.1.attn.c_attn.bias'"));
  const Tensors saved = weights("saved");
  for (const auto& [name, bytes] : weights("one")) EXPECT_TRUE(bytes == saved.at(name)) << name;
}

TEST_F(CliLoad, TakesTensorsByOtherNamesOnTwoRanksToo) {
  const Output swapped = load(
      "swapped", {"--load-rename", "h.0.*=h.1.*;h.1.*=h.0.*", "--nproc", "2", "--zero-stage", "3"});
  ASSERT_EQ(swapped.exit_code, 0) << swapped.err;
  const Tensors saved = weights("saved");
  for (const auto& [name, bytes] : weights("swapped")) {
    std::string there = name;
    if (name.starts_with("h.")) there[2] = name[2] == '0' ? '1' : '0';
    EXPECT_TRUE(bytes == saved.at(there)) << name;
  }
  const Output wrong = load("wrong", {"--load-rename", "block.*=h.*"});
  EXPECT_EQ(wrong.exit_code, 1);
  EXPECT_THAT(wrong.err, HasSubstr("has no parameter called 'block.*'"));
  const Output unclear = load("wrong", {"--load-rename", "h.0.*=x"});
  EXPECT_EQ(unclear.exit_code, 2);
  EXPECT_THAT(unclear.err, AllOf(HasSubstr("--load-rename"), HasSubstr("OLD=NEW")));
  EXPECT_THAT(train("wrong", {"--load-partial"}).err, HasSubstr("give --load too"));
}

}  // namespace cli_load_test
}  // namespace ziggurat::test
