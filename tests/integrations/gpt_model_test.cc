// SPDX-License-Identifier: Apache-2.0
// tests/integrations/gpt_model_test.cc: names, sizes, initial values.
#include <gmock/gmock.h>

#include <cmath>
#include <set>

#include "base/error.h"
#include "integrations/gpt/model.h"

namespace ziggurat::gpt {
namespace {

TEST(GptModel, SmallHasTheParametersItSaysItHas) {
  const ModelSpec spec = make_spec(parse_model("gpt2-small"));
  EXPECT_EQ(spec.count(), 86'039'040U);
  EXPECT_EQ(spec.units.size(), 13U);
  EXPECT_EQ(spec.units[1].count(), 7'087'872U);
}

TEST(GptModel, NamesAreHuggingFaces) {
  const ModelSpec spec = make_spec(parse_model("2x32x2"));
  std::set<std::string> names;
  for (const UnitSpec& unit : spec.units) {
    for (const ParamSpec& param : unit.params)
      EXPECT_TRUE(names.insert(param.name).second) << param.name;
  }
  EXPECT_EQ(names.size(), 4U + 2 * 12U);
  EXPECT_THAT(names, ::testing::IsSupersetOf({"wte.weight", "wpe.weight", "ln_f.bias",
                                              "h.1.attn.c_attn.weight", "h.1.attn.c_proj.bias",
                                              "h.0.mlp.c_fc.weight", "h.0.mlp.c_proj.weight",
                                              "h.1.ln_2.weight"}));
  EXPECT_THAT(spec.units[1].params[0].shape, ::testing::ElementsAre(32, 96));  // Conv1D: [in, out]
}

TEST(GptModel, MatricesComeFirstAndAloneDecay) {
  for (const UnitSpec& unit : make_spec(parse_model("1x32x2")).units) {
    bool vectors = false;
    for (const ParamSpec& param : unit.params) {
      EXPECT_EQ(param.decay, param.shape.size() == 2) << param.name;
      vectors |= !param.decay;
      EXPECT_EQ(param.decay, !vectors) << param.name << " is a matrix after a vector";
    }
  }
}

TEST(GptModel, LayoutAgreesWithTheSpec) {
  const ModelConfig config = parse_model("1x32x2");
  const ModelSpec spec = make_spec(config);
  const BlockLayout at(config);
  const std::int64_t offsets[] = {at.qkv_weight,  at.attention_projection_weight,
                                  at.fc_weight,   at.mlp_projection_weight,
                                  at.ln_1_weight, at.ln_1_bias,
                                  at.qkv_bias,    at.attention_projection_bias,
                                  at.ln_2_weight, at.ln_2_bias,
                                  at.fc_bias,     at.mlp_projection_bias};
  const char* names[] = {"attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight",
                         "mlp.c_proj.weight",  "ln_1.weight",        "ln_1.bias",
                         "attn.c_attn.bias",   "attn.c_proj.bias",   "ln_2.weight",
                         "ln_2.bias",          "mlp.c_fc.bias",      "mlp.c_proj.bias"};
  std::int64_t next = 0;
  for (std::size_t i = 0; i < spec.units[1].params.size(); ++i) {
    EXPECT_EQ(spec.units[1].params[i].name, std::string("h.0.") + names[i]);
    EXPECT_EQ(offsets[i], next) << names[i];
    next += static_cast<std::int64_t>(spec.units[1].params[i].count());
  }
}

TEST(GptModel, ReadsItsOwnNameBack) {
  for (const char* text : {"gpt2-small", "gpt2-medium", "3x96x6"}) {
    const ModelConfig config = parse_model(text);
    EXPECT_EQ(parse_model(to_string(config)), config);
    EXPECT_EQ(parse_model(make_spec(config).name), config);
  }
}

TEST(GptModel, RefusesNonsenseByName) {
  for (const char* text :
       {"", "gpt3", "12", "12x768", "12x768x", "12x768x12x", "0x768x12", "-1x768x12", "12x768x7",
        "2x40x2", "12x768x12 ", "99999999999999999999x768x12", "2000x768x12"}) {
    try {
      parse_model(text);
      ADD_FAILURE() << text << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), ::testing::HasSubstr(std::string("\"") + text + "\""));
    }
  }
}

TEST(GptInitializer, AnyRangeIsThatRangeOfTheWhole) {
  const ModelConfig config = parse_model("2x32x2");
  const ModelSpec spec = make_spec(config);
  const Initializer init = make_initializer(config, 7);
  for (UnitId unit = 0; unit < spec.units.size(); ++unit) {
    std::vector<float> whole(spec.units[unit].count());
    init(unit, 0, whole);
    for (const std::size_t size : {1U, 2U, 777U, 4096U}) {
      std::vector<float> pieces(whole.size());
      for (std::size_t at = 0; at < whole.size(); at += size) {
        init(unit, at, std::span(pieces).subspan(at, std::min(size, whole.size() - at)));
      }
      EXPECT_EQ(pieces, whole) << "unit " << unit << " in pieces of " << size;
    }
  }
}

TEST(GptInitializer, HasTheDeviationsOfGpt2) {
  const ModelConfig config = parse_model("8x128x2");
  const BlockLayout at(config);
  const Initializer init = make_initializer(config, 3);
  std::vector<float> block(make_spec(config).units[1].count());
  init(block_unit(2), 0, block);
  const auto deviation = [&](std::int64_t first, std::int64_t end) {
    double sum = 0;
    double squares = 0;
    for (std::int64_t i = first; i < end; ++i) {
      const auto x = static_cast<double>(block[static_cast<std::size_t>(i)]);
      sum += x;
      squares += x * x;
    }
    const auto n = static_cast<double>(end - first);
    EXPECT_LT(std::abs(sum / n), 0.02 * 5 / std::sqrt(n));
    return std::sqrt(squares / n);
  };
  EXPECT_NEAR(deviation(at.qkv_weight, at.attention_projection_weight), 0.02, 0.0004);
  EXPECT_NEAR(deviation(at.mlp_projection_weight, at.ln_1_weight), 0.02 / 4,
              0.0001);  // sqrt(2 * 8 layers)
  EXPECT_EQ(block[static_cast<std::size_t>(at.ln_1_weight)], 1.0F);
  EXPECT_EQ(block[static_cast<std::size_t>(at.fc_bias)], 0.0F);
}

TEST(GptInitializer, SeedsAndUnitsDiffer) {
  const ModelConfig config = parse_model("2x32x2");
  std::vector<float> a(100);
  std::vector<float> b(100);
  std::vector<float> c(100);
  make_initializer(config, 1)(1, 0, a);
  make_initializer(config, 2)(1, 0, b);
  make_initializer(config, 1)(2, 0, c);
  EXPECT_NE(a, b);
  EXPECT_NE(a, c);
}

}  // namespace
}  // namespace ziggurat::gpt
