// SPDX-License-Identifier: Apache-2.0
// tests/core/checkpoint_manifest_test.cc: a manifest comes back as it was; anything else is
// refused, naming the tensor or the file, before anything is sized by it.
#include "core/checkpoint/manifest.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "base/checksum.h"
#include "base/error.h"

namespace ziggurat {
namespace checkpoint_manifest_test {

using ::testing::HasSubstr;

/// A matrix in three boxes over two files, and a vector.
Manifest sound_manifest() {
  Manifest manifest;
  manifest.content = {.model = "small",
                      .dtype = DType::kBFloat16,
                      .state = StateKind{},
                      .units = {{.name = "unit", .params = {"w", "b"}}},
                      .tensors = {{.name = "w",
                                   .owner = "w",
                                   .array = "master",
                                   .type = TensorType::kF32,
                                   .shape = {4, 5}},
                                  {.name = "optimizer.exp_avg.b",
                                   .owner = "b",
                                   .array = "exp_avg",
                                   .type = TensorType::kBF16,
                                   .shape = {7}}},
                      .step = 12,
                      .blob = {std::byte{1}, std::byte{0xff}},
                      .run_identity = "seed=1",
                      .numerics_fingerprint = "test",
                      .layout = {.ranks = 2, .placement = "host"},
                      .resume = {{"loss_scale", "null"}, {"schedule", R"({"lr":"0.1"})"}},
                      .versions = {{"manifest", "1"}}};
  manifest.files = {{.name = "a.safetensors", .size_bytes = 300, .header_bytes = 100},
                    {.name = "b.safetensors", .size_bytes = 300, .header_bytes = 80}};
  const auto piece = [](std::uint32_t tensor, std::uint32_t file, std::uint64_t offset,
                        TensorBox box, std::uint64_t size) {
    return StatePiece{.tensor = tensor,
                      .file = file,
                      .offset_bytes = offset,
                      .box = std::move(box),
                      .hashed = {{size - 4, 0x1234}, {4, 0xfedcba9876543210}}};
  };
  manifest.pieces = {piece(0, 0, 100, {{0, 0}, {2, 5}}, 40), piece(0, 1, 80, {{2, 0}, {2, 5}}, 40),
                     piece(1, 0, 140, {{0}, {7}}, 14)};
  return manifest;
}

std::string with_checksum(const std::string& rest) {
  return fmt::format("{{\"checksum\":\"{:016x}\",\n{}", hash64(std::as_bytes(std::span(rest)), 0),
                     rest);
}
std::string rest_of(const std::string& text) { return text.substr(text.find('\n') + 1); }

std::string refusal(const std::string& text) {
  try {
    static_cast<void>(parse_manifest(text, "the/manifest"));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDataLoss);
    return error.what();
  }
  return "none";
}

TEST(Manifest, ComesBackAsItWas) {
  Manifest manifest = sound_manifest();
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    manifest.content.dtype = dtype;
    const std::string text = to_text(manifest);
    EXPECT_EQ(parse_manifest(text, "x"), manifest);
    EXPECT_EQ(to_text(parse_manifest(text, "x")), text);
    EXPECT_THAT(text, HasSubstr("\"loss_scale\":null"));
  }
}

TEST(Manifest, SaysTheLineOfHistoryThatItsStateIsOf) {
  Manifest manifest = sound_manifest();
  manifest.content.line = StateLine{
      .id = {0x1234, 0x5678}, .epoch = 3, .parent = LineId{0xfedcba9876543210, 7}, .left_at = 12};
  const std::string text = to_text(manifest);
  EXPECT_THAT(text, HasSubstr("\"id\":\"00000000000012340000000000005678\""));
  EXPECT_EQ(parse_manifest(text, "x"), manifest);
  EXPECT_EQ(line_in(text.substr(0, 400), "x"), manifest.content.line) << "its first bytes do";
  manifest.content.line->parent.reset();
  EXPECT_EQ(parse_manifest(to_text(manifest), "x"), manifest);
  for (const char* const wrong : {"1234", "0000000000001234000000000000567g"}) {
    std::string other = rest_of(to_text(manifest));
    other.replace(other.find("00000000000012340000000000005678"), 32, wrong);
    EXPECT_THAT(refusal(with_checksum(other)), HasSubstr("line's id"));
  }
}

/// By those made before lines were kept.
TEST(Manifest, WithoutALineIsReadAsItWas) {
  const std::string text = to_text(sound_manifest());
  EXPECT_THAT(text, ::testing::Not(HasSubstr("\"line\"")));
  EXPECT_FALSE(parse_manifest(text, "x").content.line);
  EXPECT_FALSE(line_in(text, "x"));
}

TEST(Manifest, IsSummarizedWithoutItsPieces) {
  Manifest manifest = sound_manifest();
  manifest.content.line = StateLine{.id = {1, 2}, .epoch = 1, .parent = {}, .left_at = 0};
  std::string text = to_text(manifest);
  const ManifestSummary summary = summarize_manifest(text, "x");
  EXPECT_EQ(summary.content, manifest.content);
  EXPECT_EQ(summary.files, manifest.files);
  text[text.size() / 2] ^= 1;
  EXPECT_THROW(static_cast<void>(summarize_manifest(text, "x")), Error);
}

TEST(Manifest, SaysWhatAResumeElsewhereLacks) {
  StateContent content = sound_manifest().content;
  EXPECT_THAT(missing_resume_names(content),
              ::testing::ElementsAre("consumed_samples", "consumed_tokens", "data_cursor", "rng",
                                     "best_metric", "data", "evaluation", "tokenizer"));
  for (const std::string_view name : kResumeNames) content.resume[std::string(name)] = "1";
  content.resume["loss_scale"] = "null";
  EXPECT_THAT(missing_resume_names(content), ::testing::IsEmpty());
  content.resume["rng"] = "null";
  EXPECT_THAT(missing_resume_names(content), ::testing::ElementsAre("rng"));
}

struct Broken {
  const char* name;
  std::function<void(Manifest&)> damage;
  const char* message;
};
class EveryRule : public ::testing::TestWithParam<Broken> {};

TEST_P(EveryRule, RefusesAndNames) {
  Manifest manifest = sound_manifest();
  GetParam().damage(manifest);
  try {
    static_cast<void>(to_text(manifest));
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr(GetParam().message));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Rules, EveryRule,
    ::testing::Values(
        Broken{"path", [](Manifest& m) { m.files[0].name = "../a"; }, "'../a'"},
        Broken{"slash", [](Manifest& m) { m.files[0].name = "x/a"; }, "'x/a'"},
        Broken{"hidden", [](Manifest& m) { m.files[0].name = ".a"; }, "'.a'"},
        Broken{"no_name", [](Manifest& m) { m.files[0].name = ""; }, "''"},
        Broken{"itself", [](Manifest& m) { m.files[0].name = "manifest.json"; }, "manifest.json"},
        Broken{"twice", [](Manifest& m) { m.files[0].name = "b.safetensors"; },
               "names the file 'b.safetensors' twice"},
        Broken{"header", [](Manifest& m) { m.files[0].header_bytes = 301; },
               "'a.safetensors' has 301 bytes"},
        Broken{"tensor_twice", [](Manifest& m) { m.content.tensors[1].name = "w"; },
               "names the tensor 'w' twice"},
        Broken{"array", [](Manifest& m) { m.content.tensors[0].array = "exp_avg"; },
               "masters, and only masters, must have their parameter's name"},
        Broken{"dimension", [](Manifest& m) { m.content.tensors[1].shape = {0}; },
               "a dimension of 0"},
        Broken{"product",
               [](Manifest& m) {
                 m.content.tensors[1].shape = {1 << 30, 1 << 30};
               },
               "'optimizer.exp_avg.b' has a dimension"},
        Broken{"outside", [](Manifest& m) { m.pieces[1].box.offsets[0] = 3; },
               "outside of the tensor"},
        Broken{"dimensions", [](Manifest& m) { m.pieces[2].box.shape.push_back(1); },
               "has 1 dimensions, but one of its pieces has 1 offsets and 2 sizes"},
        Broken{"leaves", [](Manifest& m) { m.pieces[1].offset_bytes = 290; },
               "which do not fit between the header and the end"},
        Broken{"in_header", [](Manifest& m) { m.pieces[1].offset_bytes = 79; },
               "which do not fit between the header and the end"},
        Broken{"no_tensor", [](Manifest& m) { m.pieces[1].tensor = 2; }, "belongs to tensor 2"},
        Broken{"no_file", [](Manifest& m) { m.pieces[1].file = 2; }, "in file 2"},
        Broken{"hashed_less", [](Manifest& m) { m.pieces[0].hashed.pop_back(); },
               "has hashes for only"},
        Broken{"hashed_much", [](Manifest& m) { m.pieces[0].hashed[0].size_bytes = 1 << 30; },
               "covers 1073741824 bytes"},
        Broken{"on_another", [](Manifest& m) { m.pieces[2].offset_bytes = 138; },
               "overlaps another tensor in file 'a.safetensors'"},
        Broken{"overlap", [](Manifest& m) { m.pieces[1].box.offsets[0] = 1; },
               "the pieces of tensor 'w' overlap"},
        Broken{"missing", [](Manifest& m) { m.pieces.pop_back(); }, "only 0 of its 7 elements"},
        Broken{"once_a_file",
               [](Manifest& m) {
                 m.pieces[1].file = 0;
                 m.pieces[1].offset_bytes = 200;
               },
               "'w' has two pieces in file"}),
    [](const auto& its) { return its.param.name; });

TEST(ManifestText, IsRefusedWhereItIsNotWhatWasWritten) {
  const std::string text = to_text(sound_manifest());
  const std::string rest = rest_of(text);
  EXPECT_THAT(refusal(text.substr(0, text.size() - 2)), HasSubstr("checksum of the/manifest"));
  EXPECT_THAT(refusal(rest), HasSubstr("does not begin with a checksum"));
  EXPECT_THAT(refusal(""), HasSubstr("the/manifest"));
  EXPECT_THAT(refusal(with_checksum(rest + "{}")), HasSubstr("the/manifest"));
  EXPECT_THAT(refusal(with_checksum(rest + std::string(1, '\0'))), HasSubstr("NUL"));
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string changed = rest;
    changed.replace(changed.find(from), from.size(), to);
    return refusal(with_checksum(changed));
  };
  EXPECT_THAT(replaced("\"schema\":1", "\"schema\":2"), HasSubstr("use a newer version"));
  EXPECT_THAT(replaced("\"schema\":1", "\"schema\":-1"), HasSubstr("not a whole number"));
  EXPECT_THAT(replaced("\"step\":12", "\"step\":12,\"step\":13"), HasSubstr("appears twice"));
  EXPECT_THAT(replaced("\"step\":12", "\"stop\":12"), HasSubstr("'step' is missing"));
  EXPECT_THAT(replaced("\"step\":12", "\"step\":12,\"more\":1"), HasSubstr("'more' is not known"));
  EXPECT_THAT(replaced("\"step\":12", "\"step\":1.5"), HasSubstr("content.step"));
  EXPECT_THAT(replaced("\"step\":12", "\"step\":" + std::string(30, '[') + std::string(30, ']')),
              HasSubstr("nested too deeply"));
  EXPECT_THAT(replaced("0000000000001234", "000000000000123x"),
              HasSubstr("not a hash of 16 digits"));
}

/// Whatever is done to a text, with its checksum made anew or not: it is refused, or it is another
/// manifest that keeps every rule.
TEST(ManifestText, SurvivesTenThousandCorruptions) {
  std::mt19937_64 random(7);
  const std::string sound = to_text(sound_manifest());
  std::size_t accepted = 0;
  for (int i = 0; i < 10'000; ++i) {
    std::string rest = i % 2 == 0 ? rest_of(sound) : sound;
    for (std::uint64_t changes = 1 + random() % 3; changes > 0; --changes) {
      const std::size_t at = random() % rest.size();
      switch (random() % 5) {
        case 0: rest[at] = static_cast<char>(random()); break;
        case 1: rest.resize(at + 1); break;
        case 2: rest.erase(at, 1 + random() % 8); break;
        case 3: rest.insert(at, rest.substr(random() % rest.size(), random() % 20)); break;
        case 4: rest[at] = "0123456789[]{}\",:-."[random() % 19]; break;
      }
      if (rest.empty()) rest = " ";
    }
    try {
      const Manifest manifest = parse_manifest(i % 2 == 0 ? with_checksum(rest) : rest, "x");
      EXPECT_EQ(parse_manifest(to_text(manifest), "y"), manifest);
      ++accepted;
      EXPECT_TRUE(i % 2 == 0 || manifest == sound_manifest()) << rest;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDataLoss);
    }
  }
  EXPECT_GT(accepted, 0U);
}

}  // namespace checkpoint_manifest_test
}  // namespace ziggurat
