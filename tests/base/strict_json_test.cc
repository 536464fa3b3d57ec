// SPDX-License-Identifier: Apache-2.0
// tests/base/strict_json_test.cc: what is JSON and nothing else is read as anybody reads it; what
// two readers would read differently is refused.
#include "base/strict_json.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "base/error.h"

namespace ziggurat {
namespace strict_json_test {

using nlohmann::json;
using ::testing::HasSubstr;

std::string refusal(const std::string& text) {
  try {
    static_cast<void>(parse_strict(text, "here"));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDataLoss);
    EXPECT_THAT(error.what(), ::testing::StartsWith("here: "));
    return error.what();
  }
  return "none";
}

std::string nested(int levels, const std::string& inside) {
  std::string text(static_cast<std::size_t>(levels), '[');
  return text + inside + std::string(static_cast<std::size_t>(levels), ']');
}

json value_of(std::mt19937& random, int levels) {
  switch (random() % (levels > 0 ? 9 : 7)) {
    case 0: return nullptr;
    case 1: return random() % 2 == 0;
    case 2: return std::uint64_t{random()} << (random() % 33);
    case 3: return -static_cast<std::int64_t>(random());
    case 4: return static_cast<double>(random()) / 7.0;
    case 5: return json::object();
    case 6: return fmt::format("text \"{}\"\n\u00e9", random() % 100);
    case 7: {
      json array = json::array();
      for (auto i = random() % 5; i > 0; --i) array.push_back(value_of(random, levels - 1));
      return array;
    }
    default: break;
  }
  json object = json::object();
  for (auto i = random() % 5; i > 0; --i)
    object[fmt::format("key {}", random() % 9)] = value_of(random, levels - 1);
  return object;
}

TEST(StrictJson, IsReadAsByAnyReader) {
  std::mt19937 random(7);
  for (int i = 0; i < 2000; ++i) {
    const std::string text = value_of(random, 5).dump(static_cast<int>(random() % 3) - 1);
    const json value = parse_strict(text, "here");
    ASSERT_EQ(value, json::parse(text)) << text;
    ASSERT_EQ(value.dump(), json::parse(text).dump()) << "numbers have their kinds: " << text;
  }
}

TEST(StrictJson, MayHaveManyMembersWithMembers) {
  std::string text = "{";
  for (int i = 0; i < 20'000; ++i)
    text += fmt::format("{}\"tensor {}\":{{\"shape\":[{},2],\"type\":\"F32\"}}", i > 0 ? "," : "",
                        i, i);
  const json value = parse_strict(text + "}", "here");
  EXPECT_EQ(value.size(), 20'000U);
  EXPECT_EQ(value["tensor 19999"]["shape"], json::array({19'999, 2}));
  EXPECT_THAT(refusal(text + ",\"tensor 7\":1}"), HasSubstr("the key 'tensor 7' appears twice"));
}

TEST(StrictJson, RefusesAKeyTwiceInOneObject) {
  EXPECT_EQ(refusal(R"({"a":{"b":1},"b":{"b":2},"c":[{"b":3},{"b":4}]})"), "none");
  EXPECT_THAT(refusal(R"({"a":1,"b":2,"a":1})"), HasSubstr("the key 'a' appears twice"));
  EXPECT_THAT(refusal(R"([0,{"x":{"a":1,"a":2}}])"), HasSubstr("the key 'a' appears twice"));
  EXPECT_THAT(refusal(R"({"a":1,"\u0061":2})"), HasSubstr("the key 'a' appears twice"));
}

TEST(StrictJson, RefusesWhatIsNestedTooDeeply) {
  EXPECT_EQ(refusal(nested(kJsonDepthMax, "1")), "none");
  EXPECT_EQ(refusal(nested(kJsonDepthMax, "[]")), "none");
  EXPECT_EQ(refusal(nested(kJsonDepthMax, "{}")), "none");
  for (const char* inside : {"1", "\"\"", "null", "[]", "{}", "1.5", "-1", "true"})
    EXPECT_THAT(refusal(nested(kJsonDepthMax + 1, inside)), HasSubstr("nested too deeply"));
  EXPECT_THAT(refusal(nested(kJsonDepthMax, "{\"a\":1}")), HasSubstr("nested too deeply"));
}

TEST(JsonField, HasNoValueBehindTheLastOfAnArray) {
  const json array = json::parse("[1, 2]");
  const JsonField field(array, "here");
  EXPECT_EQ(field.at(1).number(), 2U);
  EXPECT_THAT([&] { field.at(2); },
              ::testing::ThrowsMessage<Error>("here: the array has 2 values but needs 3"));
}

TEST(StrictJson, RefusesWhatIsNoneOrMore) {
  for (const char* text : {"", "{", "[1,]", "{\"a\"}", "{\"a\":1,}", "[1] 2", "nul", "'a'", "01",
                           "\"\xff\"", "\"\x01\"", "1e999", "{1:2}", "// a\n1"})
    EXPECT_NE(refusal(text), "none") << text;
  EXPECT_THAT(refusal(std::string("[1]\0", 4)), HasSubstr("a NUL byte"));
}

}  // namespace strict_json_test
}  // namespace ziggurat
