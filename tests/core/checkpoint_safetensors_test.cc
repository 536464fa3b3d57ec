// SPDX-License-Identifier: Apache-2.0
// tests/core/checkpoint_safetensors_test.cc: a safetensors file is what the format says, or is not
// there at all.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "base/error.h"
#include "base/numerics/float16.h"
#include "core/checkpoint/safetensors_writer.h"

namespace ziggurat {
namespace checkpoint_safetensors_test {

namespace fs = std::filesystem;
using nlohmann::json;

class SafetensorsTest : public ::testing::Test {
 protected:
  SafetensorsTest() {
    std::string pattern = (fs::current_path() / "safetensors-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~SafetensorsTest() override { fs::remove_all(folder_); }

  std::string path(const std::string& name = "model.safetensors") const {
    return (folder_ / name).string();
  }
  std::size_t files() const {
    return static_cast<std::size_t>(
        std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }

  fs::path folder_;
};

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// A reader of the rules, not of our writer: throws where the reference implementation would
/// refuse.
struct ParsedFile {
  json header;
  std::string data;

  explicit ParsedFile(const std::string& path) {
    const std::string text = contents(path);
    std::uint64_t length = 0;
    if (text.size() < 8) throw std::runtime_error("shorter than its header's length");
    std::memcpy(&length, text.data(), 8);
    if (length > text.size() - 8) throw std::runtime_error("shorter than its header");
    if (text.at(8) != '{') throw std::runtime_error("header does not begin with {");
    if ((8 + length) % 8 != 0) throw std::runtime_error("data is not aligned");
    header = json::parse(text.substr(8, length));
    data = text.substr(8 + length);
    std::map<std::uint64_t, std::uint64_t> ranges;
    for (const auto& [name, tensor] : header.items()) {
      if (name == "__metadata__") continue;
      std::uint64_t bytes = tensor.at("dtype") == "F32" ? 4 : 2;
      for (const std::uint64_t dimension : tensor.at("shape")) bytes *= dimension;
      const std::uint64_t begin = tensor.at("data_offsets").at(0);
      const std::uint64_t end = tensor.at("data_offsets").at(1);
      if (end - begin != bytes) throw std::runtime_error(name + ": offsets do not match its shape");
      if (bytes > 0) ranges[begin] = end;
    }
    std::uint64_t at = 0;
    for (const auto& [begin, end] : ranges) {
      if (begin != at) throw std::runtime_error("a hole between tensors");
      at = end;
    }
    if (at != data.size()) throw std::runtime_error("data is not as long as its tensors");
  }

  float value(const std::string& name, std::size_t index) const {
    const json& tensor = header.at(name);
    const std::size_t begin = tensor.at("data_offsets").at(0);
    if (tensor.at("dtype") == "F32") {
      float result;
      std::memcpy(&result, data.data() + begin + index * 4, 4);
      return result;
    }
    std::uint16_t result;
    std::memcpy(&result, data.data() + begin + index * 2, 2);
    return tensor.at("dtype") == "F16" ? fp16_to_float(result) : bf16_to_float(result);
  }
};

TEST_F(SafetensorsTest, HoldsNamesShapesTypesAndValuesInTheFormatsTerms) {
  SafetensorsWriter writer(path(),
                           {{.name = "wte.weight", .type = TensorType::kF32, .shape = {2, 3}},
                            {.name = "scale", .type = TensorType::kBF16, .shape = {}},
                            {.name = "ln.bias", .type = TensorType::kBF16, .shape = {3}},
                            {.name = "ln.weight", .type = TensorType::kF16, .shape = {3}}},
                           {.metadata = {{"format", "pt"}}});
  writer.append(std::vector<float>{1, 2, 3, 4, 5, 6});
  writer.append(std::vector<float>{0.5F, 1.00390625F, -3, 1e30F, 1.00048828125F, 65519, 65520});
  writer.finish();
  EXPECT_EQ(writer.written_bytes(), writer.file_bytes());

  const ParsedFile file(path());
  EXPECT_EQ(file.header.at("__metadata__").at("format"), "pt");
  EXPECT_EQ(file.header.at("wte.weight").at("shape"), json::array({2, 3}));
  EXPECT_EQ(file.header.at("scale").at("shape"), json::array());
  EXPECT_EQ(file.value("wte.weight", 5), 6.0F);
  EXPECT_EQ(file.value("scale", 0), 0.5F);
  EXPECT_EQ(file.value("ln.bias", 0), bf16_to_float(float_to_bf16(1.00390625F)));
  EXPECT_EQ(file.value("ln.bias", 1), -3.0F);
  EXPECT_EQ(file.header.at("ln.weight").at("dtype"), "F16");
  EXPECT_EQ(file.value("ln.weight", 0), 1.0F) << "ties to even";
  EXPECT_EQ(file.value("ln.weight", 1), 65504.0F);
  EXPECT_EQ(file.value("ln.weight", 2), INFINITY);
}

TEST_F(SafetensorsTest, AnySplitOfTheValuesMakesTheSameFile) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 20; ++round) {
    std::vector<SafetensorsTensor> tensors;
    std::uint64_t count = 0;
    for (unsigned i = 0; i < 1 + random() % 6; ++i) {
      tensors.push_back({.name = "t" + std::to_string(i),
                         .type = random() % 2 ? TensorType::kF32 : TensorType::kBF16,
                         .shape = {static_cast<std::int64_t>(random() % 5),
                                   static_cast<std::int64_t>(random() % 9)}});
      count += tensors.back().count();
    }
    std::vector<float> values(count);
    for (float& value : values) value = static_cast<float>(random()) - 2e9F;
    for (const char* name : {"whole", "split"}) {
      SafetensorsWriter writer(path(name), tensors, {.overwrite = true, .metadata = {}});
      std::span<const float> rest = values;
      while (!rest.empty()) {
        const std::size_t take =
            std::string_view(name) == "whole" ? rest.size() : 1 + random() % rest.size();
        writer.append(rest.first(take));
        rest = rest.subspan(take);
      }
      writer.finish();
    }
    EXPECT_EQ(contents(path("whole")), contents(path("split")));
    const ParsedFile file(path("whole"));
    std::size_t at = 0;
    for (const SafetensorsTensor& tensor : tensors) {
      for (std::size_t i = 0; i < tensor.count(); ++i, ++at) {
        const float expected =
            tensor.type == TensorType::kF32 ? values[at] : bf16_to_float(float_to_bf16(values[at]));
        ASSERT_EQ(file.value(tensor.name, i), expected) << tensor.name << " " << i;
      }
    }
  }
}

TEST_F(SafetensorsTest, ValuesThatCrossTheBufferAreWhole) {
  const std::int64_t count = 700'001;
  SafetensorsWriter writer(path(), {{.name = "big", .type = TensorType::kBF16, .shape = {count}}},
                           {});
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 251);
  writer.append(values);
  writer.finish();
  const ParsedFile file(path());
  for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(file.value("big", i), values[i]);
}

TEST_F(SafetensorsTest, AFileThatIsThereStaysUnlessAskedFor) {
  std::ofstream(path()) << "precious";
  const std::vector<SafetensorsTensor> tensors{
      {.name = "t", .type = TensorType::kF32, .shape = {1}}};
  try {
    SafetensorsWriter(path(), tensors, {});
    FAIL() << "replaced a file unasked";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("`force`"));
  }
  EXPECT_EQ(contents(path()), "precious");

  SafetensorsWriter writer(path(), tensors, {.overwrite = true, .metadata = {}});
  writer.append(std::vector<float>{7});
  EXPECT_EQ(contents(path()), "precious");  // until it is whole
  writer.finish();
  EXPECT_EQ(ParsedFile(path()).value("t", 0), 7.0F);
}

TEST_F(SafetensorsTest, AFileThatAppearsMeanwhileStaysToo) {
  SafetensorsWriter writer(path(), {{.name = "t", .type = TensorType::kF32, .shape = {0}}}, {});
  std::ofstream(path()) << "precious";
  EXPECT_THROW(writer.finish(), Error);
  EXPECT_EQ(contents(path()), "precious");
}

TEST_F(SafetensorsTest, AnAbandonedWriterLeavesNothing) {
  {
    SafetensorsWriter writer(path(), {{.name = "t", .type = TensorType::kF32, .shape = {4}}}, {});
    writer.append(std::vector<float>{1, 2});
    EXPECT_EQ(files(), 1U);
    EXPECT_THROW(writer.finish(), Error);
    EXPECT_FALSE(fs::exists(path()));
  }
  EXPECT_EQ(files(), 0U);
}

TEST_F(SafetensorsTest, TooManyValuesAreRefused) {
  SafetensorsWriter writer(path(), {{.name = "t", .type = TensorType::kF32, .shape = {2}}}, {});
  writer.append(std::vector<float>{1, 2});
  EXPECT_THROW(writer.append(std::vector<float>{3}), Error);
}

// A file that cannot grow to its size is refused before the first tensor is asked for; what was
// there stays.
TEST_F(SafetensorsTest, AFullDiskIsSaidAtOnceAndLeavesNothing) {
  std::ofstream(path()) << "precious";
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  struct rlimit limit = before;
  limit.rlim_cur = 4096;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  ErrorCode code = ErrorCode::kCancelled;
  std::string message;
  try {
    SafetensorsWriter(path(), {{.name = "t", .type = TensorType::kF32, .shape = {4096}}},
                      {.overwrite = true, .metadata = {}});
  } catch (const Error& error) {
    code = error.code();
    message = error.what();
  }
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  ::signal(SIGXFSZ, handler);
  EXPECT_EQ(code, ErrorCode::kResourceExhausted) << message;
  EXPECT_THAT(message, ::testing::HasSubstr("model.safetensors"));
  EXPECT_EQ(files(), 1U);
  EXPECT_EQ(contents(path()), "precious");
}

TEST_F(SafetensorsTest, ALinkOrAFolderUnderTheNameIsRefused) {
  const std::vector<SafetensorsTensor> tensors{
      {.name = "t", .type = TensorType::kF32, .shape = {1}}};
  fs::create_symlink(path("elsewhere"), path());
  EXPECT_THROW(SafetensorsWriter(path(), tensors, {.overwrite = true, .metadata = {}}), Error);
  fs::create_directory(path("folder"));
  EXPECT_THROW(SafetensorsWriter(path("folder"), tensors, {.overwrite = true, .metadata = {}}),
               Error);
  EXPECT_THROW(SafetensorsWriter(path("no/such/folder"), tensors, {}), Error);
}

TEST_F(SafetensorsTest, TheUmaskDecidesWhoMayReadIt) {
  const mode_t mask = ::umask(022);
  SafetensorsWriter writer(path(), {}, {});
  writer.finish();
  ::umask(mask);
  struct stat status {};
  ASSERT_EQ(::stat(path().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0644U);
}

TEST(SafetensorsHeader, RefusesNamesThatReadersWouldRefuse) {
  const auto header = [](std::vector<std::string> names) {
    std::vector<SafetensorsTensor> tensors;
    for (std::string& name : names)
      tensors.push_back({.name = name, .type = TensorType::kF32, .shape = {1}});
    return safetensors_header(tensors, {});
  };
  EXPECT_THROW(header({""}), Error);
  EXPECT_THROW(header({"__metadata__"}), Error);
  EXPECT_THROW(header({"a", "b", "a"}), Error);
  EXPECT_THROW(header({"\xff\xfe"}), Error);
  EXPECT_NO_THROW(header({"a\"b\\c", "h.0.ln_1.weight"}));
  const SafetensorsTensor negative{.name = "n", .type = TensorType::kF32, .shape = {2, -1}};
  EXPECT_THROW(safetensors_header({&negative, 1}, {}), Error);
}

TEST(SafetensorsHeader, BeginsDataAtAMultipleOfEight) {
  for (std::size_t length = 1; length < 20; ++length) {
    const SafetensorsTensor tensor{
        .name = std::string(length, 'x'), .type = TensorType::kF32, .shape = {1}};
    EXPECT_EQ(safetensors_header({&tensor, 1}, {}).size() % 8, 0U);
  }
}

}  // namespace checkpoint_safetensors_test
}  // namespace ziggurat
