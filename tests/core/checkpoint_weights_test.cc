// SPDX-License-Identifier: Apache-2.0
// tests/core/checkpoint_weights_test.cc: safetensors files of other tools: read where they are what
// the format says, refused by name where they are not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>

#include "base/error.h"
#include "core/checkpoint/safetensors_header.h"
#include "core/checkpoint/safetensors_source.h"
#include "core/checkpoint/safetensors_writer.h"
#include "core/engine/runtime.h"
#include "tests/support/scratch_directory.h"

namespace ziggurat {
namespace checkpoint_weights_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ziggurat::testing::ScratchDirectory;

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "it was taken";
}

std::string header_refusal(const std::string& json, std::uint64_t data_bytes = 24) {
  return refusal([&] { parse_safetensors_header(json, data_bytes, "x.safetensors"); });
}

std::string file_of(const std::string& json, const std::string& data) {
  const std::uint64_t length = json.size();
  std::string text(8, '\0');
  std::memcpy(text.data(), &length, 8);
  return text + json + data;
}

void write_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

TEST(SafetensorsHeader, IsReadInTheOrderOfOffsetsWithWhatNobodyTrainsNamed) {
  const SafetensorsHeader header =
      parse_safetensors_header(R"({"b":{"dtype":"F32","shape":[2,2],"data_offsets":[8,24]},)"
                               R"("a":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
                               R"("none":{"dtype":"BF16","shape":[0,3],"data_offsets":[8,8]},)"
                               R"("__metadata__":{"format":"pt"}}   )",
                               24, "x");
  ASSERT_EQ(header.tensors.size(), 3U);
  EXPECT_EQ(header.tensors[0].name, "a");
  EXPECT_FALSE(header.tensors[0].type);
  EXPECT_EQ(header.tensors[0].type_name, "I64");
  EXPECT_EQ(header.tensors[1].name, "none");
  EXPECT_EQ(header.tensors[2].name, "b");
  EXPECT_EQ(header.tensors[2].type, TensorType::kF32);
  EXPECT_THAT(header.tensors[2].shape, ElementsAre(2, 2));
  EXPECT_EQ(header.tensors[2].offset_bytes, 8U);
  EXPECT_EQ(header.metadata.at("format"), "pt");
}

TEST(SafetensorsHeader, RefusesWhatIsNotOneAndNamesTheTensor) {
  const auto one = [](const std::string& fields) { return R"({"w":{)" + fields + "}}"; };
  const std::string whole = R"("dtype":"F32","shape":[6],"data_offsets":[0,24])";
  EXPECT_EQ(header_refusal(one(whole)), "it was taken");
  EXPECT_THAT(header_refusal(one(R"("dtype":"F32","shape":[5],"data_offsets":[0,24])")),
              AllOf(HasSubstr("x.safetensors"), HasSubstr("'w'"), HasSubstr("24 bytes")));
  EXPECT_THAT(header_refusal(one(R"("dtype":"F31","shape":[6],"data_offsets":[0,24])")),
              HasSubstr("does not know the type 'F31'"));
  EXPECT_THAT(header_refusal(one(R"("dtype":"F32","shape":[6],"data_offsets":[0,25])")),
              HasSubstr("25 is more than 24"));
  EXPECT_THAT(header_refusal(one(R"("dtype":"F32","shape":[6],"data_offsets":[24,0])")),
              HasSubstr("24 is more than 0"));
  EXPECT_THAT(header_refusal(one(R"("dtype":"F32","shape":[-6],"data_offsets":[0,24])")),
              HasSubstr("not a whole number"));
  EXPECT_THAT(header_refusal(one(R"("dtype":"F32","shape":[4294967296,4294967296,4294967296],)"
                                 R"("data_offsets":[0,24])")),
              HasSubstr("more values than a file can hold"));
  EXPECT_THAT(header_refusal(one(R"("dtype":"F32","shape":[6],"data_offsets":[0])")),
              HasSubstr("2 values"));
  EXPECT_THAT(header_refusal(one(whole + R"(,"more":1)")), HasSubstr("'more' is not known"));
  EXPECT_THAT(header_refusal(one(R"("dtype":"F32","shape":[6])")), HasSubstr("data_offsets"));
  EXPECT_THAT(header_refusal(R"({"w":{)" + whole + R"(},"w":{)" + whole + "}}"),
              HasSubstr("twice"));
  EXPECT_THAT(header_refusal(R"({"w":{)" + whole + R"(},"v":{)" + whole + "}}"),
              HasSubstr("begins at byte 0"));
  EXPECT_THAT(header_refusal(one(whole), 32), HasSubstr("32 bytes follow"));
  EXPECT_THAT(header_refusal(R"({"__metadata__":{"a":1}})", 0), HasSubstr("not a string"));
  EXPECT_THAT(header_refusal("[]", 0), HasSubstr("must be a JSON object"));
  EXPECT_THAT(header_refusal(std::string(100'000, '['), 0), HasSubstr("nested"));
  EXPECT_THAT(header_refusal(std::string("{}\0{}", 5), 0), HasSubstr("NUL"));
}

TEST(SafetensorsHeader, LengthsThatLeaveTheFileAreRefusedBeforeAnythingIsRead) {
  const auto length = [](std::uint64_t bytes, std::uint64_t file_bytes) {
    std::string first(8, '\0');
    std::memcpy(first.data(), &bytes, 8);
    return refusal([&] { safetensors_json_bytes(first, file_bytes, "x"); });
  };
  EXPECT_EQ(length(92, 100), "it was taken");
  EXPECT_THAT(length(93, 100), HasSubstr("cut off"));
  EXPECT_THAT(length(UINT64_MAX, 100), HasSubstr("cut off"));
  EXPECT_THAT(length(kSafetensorsHeaderBytesMax + 1, UINT64_MAX), HasSubstr("cut off"));
  EXPECT_THAT(refusal([] { safetensors_json_bytes("abc", 3, "x"); }), HasSubstr("3 bytes"));
}

/// Whatever a byte is changed to, the header is taken or refused: it never says of a tensor that it
/// lies where the file is not.
TEST(SafetensorsHeader, ChangedAnywhereNeverLeavesItsFile) {
  const std::string header = safetensors_header(
      std::vector<SafetensorsTensor>{{.name = "a", .type = TensorType::kF32, .shape = {3, 2}},
                                     {.name = "b", .type = TensorType::kBF16, .shape = {5}},
                                     {.name = "c", .type = TensorType::kU8, .shape = {2}}},
      {{"format", "pt"}});
  const std::string json = header.substr(8);
  std::mt19937 random(20261124);
  int taken = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::string changed = json;
    for (int i = 0; i < 1 + round % 3; ++i)
      changed[random() % changed.size()] = static_cast<char>(random() % 256);
    try {
      const SafetensorsHeader parsed = parse_safetensors_header(changed, 36, "x");
      ++taken;
      for (const StoredTensor& tensor : parsed.tensors)
        ASSERT_LE(tensor.offset_bytes + tensor.size_bytes, 36U) << changed;
    } catch (const Error&) {
    }
  }
  EXPECT_GT(taken, 0);
  EXPECT_LT(taken, 10'000);
}

class SafetensorsSourceTest : public ::testing::Test {
 protected:
  /// Opens `path` and calls `look` with the source, on the reactor.
  void with(const std::string& path, const std::function<void(SafetensorsSource&)>& look,
            const std::string& prefix = "") {
    runtime_->reactor.block_on([](Runtime& runtime, std::string folder, std::string from,
                                  std::string without,
                                  const std::function<void(SafetensorsSource&)>& then) -> Task<> {
      const auto io = runtime.io_engine(runtime.reactor, folder);
      Task<std::unique_ptr<SafetensorsSource>> opening = SafetensorsSource::open(
          {.reactor = runtime.reactor, .io = *io}, std::move(from), std::move(without));
      const std::unique_ptr<SafetensorsSource> source = co_await std::move(opening);
      then(*source);
      co_return;
    }(*runtime_, folder_.path(), path, prefix, look));
  }
  std::string open_refusal(const std::string& path) {
    return refusal([&] { with(path, [](SafetensorsSource&) {}); });
  }
  void write_model(const std::string& name, const std::vector<SafetensorsTensor>& tensors,
                   float value) {
    SafetensorsWriter writer(file(name), tensors, {.metadata = {{"format", "pt"}}});
    for (const SafetensorsTensor& tensor : tensors) {
      if (tensor.type == TensorType::kU8) {
        writer.append_bits(std::vector<std::byte>(tensor.size_bytes()));
      } else {
        writer.append(std::vector<float>(tensor.count(), value));
      }
    }
    writer.finish();
  }

  std::string file(const std::string& name) const { return folder_.path() + "/" + name; }

  ScratchDirectory folder_;
  std::unique_ptr<Runtime> runtime_ = Runtime::create({.threads = 1, .trace_path = ""});
};

TEST_F(SafetensorsSourceTest, HasTheTensorsOfAnIndexWithoutThePrefixAndNamesTheRest) {
  write_model("one.safetensors",
              {{.name = "net.a", .type = TensorType::kF32, .shape = {2, 2}},
               {.name = "unlisted", .type = TensorType::kF32, .shape = {1}}},
              1);
  write_model("two.safetensors",
              {{.name = "b", .type = TensorType::kBF16, .shape = {3}},
               {.name = "mask", .type = TensorType::kU8, .shape = {4}}},
              2);
  write_text(file("model.safetensors.index.json"),
             R"({"metadata":{},"weight_map":{"net.a":"one.safetensors","b":"two.safetensors",)"
             R"("mask":"two.safetensors"}})");
  write_text(file("config.json"), R"({"model_type":"net"})");
  with(
      folder_.path(),
      [&](SafetensorsSource& source) {
        ASSERT_EQ(source.content().tensors.size(), 2U);
        EXPECT_EQ(source.content().tensors[0].name, "a");
        EXPECT_EQ(source.content().tensors[1].type, TensorType::kBF16);
        EXPECT_FALSE(source.content().state);
        EXPECT_THAT(source.left_out(), ElementsAre("mask (U8)"));
        EXPECT_EQ(source.config(), R"({"model_type":"net"})");
      },
      "net.");
}

TEST_F(SafetensorsSourceTest, RefusesFilesAndIndexesThatDoNotAgree) {
  EXPECT_THAT(open_refusal(file("none.safetensors")), HasSubstr("does not exist"));
  write_text(file("short.safetensors"), "abc");
  EXPECT_THAT(open_refusal(file("short.safetensors")),
              HasSubstr("short.safetensors has only 3 bytes"));
  write_text(file("cut.safetensors"),
             file_of(R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "1234"));
  EXPECT_THAT(open_refusal(file("cut.safetensors")),
              AllOf(HasSubstr("cut.safetensors"), HasSubstr("'w'")));
  write_text(file("codes.safetensors"),
             file_of(R"({"w":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}})", "1234"));
  EXPECT_THAT(open_refusal(file("codes.safetensors")), HasSubstr("no tensor of a type"));
  write_text(file("shard.safetensors"),
             file_of(R"({"__metadata__":{"DCP_SHARDING_INFO":"{}"},)"
                     R"("w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
                     "1234"));
  EXPECT_THAT(open_refusal(file("shard.safetensors")), HasSubstr("give the directory"));
  const auto index = [&](const std::string& map) {
    write_text(file("model.safetensors.index.json"), R"({"weight_map":)" + map + "}");
    return open_refusal(folder_.path());
  };
  write_model("w.safetensors", {{.name = "w", .type = TensorType::kF32, .shape = {1}}}, 1);
  EXPECT_EQ(index(R"({"w":"w.safetensors"})"), "it was taken");
  EXPECT_THAT(index(R"({"v":"w.safetensors"})"), HasSubstr("w.safetensors does not have 'v'"));
  EXPECT_THAT(index(R"({"w":"../w.safetensors"})"),
              HasSubstr("not the name of a file in this directory"));
  EXPECT_THAT(index(R"({"w":"/etc/passwd"})"),
              HasSubstr("not the name of a file in this directory"));
  EXPECT_THAT(index(R"({"w":"none.safetensors"})"), HasSubstr("does not exist"));
  EXPECT_THAT(index("{}"), HasSubstr("names no tensor"));
  EXPECT_THAT(index("[]"), HasSubstr("weight_map must be a JSON object"));
}

}  // namespace checkpoint_weights_test
}  // namespace ziggurat
