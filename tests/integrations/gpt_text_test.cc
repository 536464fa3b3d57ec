// SPDX-License-Identifier: Apache-2.0
// tests/integrations/gpt_text_test.cc: what is read, what is held out, what a step sees.
#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "integrations/gpt/text.h"

namespace ziggurat::gpt {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class GptText : public ::testing::Test {
 protected:
  GptText() : folder_(fs::temp_directory_path() / ("gpt_text_" + std::to_string(::getpid()))) {
    fs::create_directories(folder_);
  }
  ~GptText() override { fs::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& content) const {
    const fs::path path = folder_ / name;
    fs::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << content;
    return path.string();
  }
  static std::string error_of(const std::string& path, std::int64_t context) {
    try {
      Text::load(path, context);
      return "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
  }
  static Text counting(std::size_t size, std::int64_t context) {
    std::vector<std::uint8_t> bytes(size);
    for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::uint8_t>(i % 251);
    return Text::from_bytes(std::move(bytes), "counting", context);
  }

  fs::path folder_;
};

TEST_F(GptText, AFolderIsItsFilesInSortedOrder) {
  write("b.txt", std::string(50, 'b'));
  write("a/z.txt", std::string(50, 'a'));
  write("c.txt", std::string(50, 'c'));
  const std::string whole =
      write("../gpt_text_whole_" + std::to_string(::getpid()),
            std::string(50, 'a') + std::string(50, 'b') + std::string(50, 'c'));
  EXPECT_EQ(Text::load(folder_.string(), 8).hash(), Text::load(whole, 8).hash());
  fs::remove(whole);
}

TEST_F(GptText, NamesWhatIsWrongWithThePath) {
  EXPECT_THAT(error_of((folder_ / "absent").string(), 8),
              HasSubstr("absent: there is no such file or folder"));
  EXPECT_THAT(error_of(write("empty", ""), 8), HasSubstr("the data has no text"));
  EXPECT_THAT(error_of(write("short", "0123456789"), 8), HasSubstr("too short for context 8"));
  EXPECT_THAT(error_of("/dev/null", 8), HasSubstr("neither a regular file nor a folder"));
  EXPECT_THAT(error_of(write("fine", std::string(100, 'x')), 0), HasSubstr("context 0"));
}

TEST_F(GptText, TwoSequencesAreEnough) {
  const Text text = counting(18, 8);
  EXPECT_EQ(text.held_out_count(), 1U);
  const Batch batch = text.training_batch({.seed = 1, .step = 0, .micro = 0}, 1);
  EXPECT_EQ(batch.inputs.front(), 0);
  EXPECT_EQ(batch.targets.back(), 8);
}

TEST_F(GptText, TheHashIsOfTheBytes) {
  EXPECT_EQ(counting(1000, 8).hash(), counting(1000, 16).hash());
  EXPECT_NE(counting(1000, 8).hash(), counting(1001, 8).hash());
}

TEST_F(GptText, TargetsAreTheNextBytes) {
  const Text text = counting(10000, 32);
  const Batch batch = text.training_batch({.seed = 3, .step = 5, .micro = 1}, 4);
  ASSERT_EQ(batch.inputs.size(), 4U * 32U);
  for (std::size_t i = 0; i < batch.inputs.size(); ++i)
    EXPECT_EQ(batch.targets[i], (batch.inputs[i] + 1) % 251);
}

TEST_F(GptText, ABatchIsAFunctionOfItsPosition) {
  const Text text = counting(10000, 32);
  const Batch batch = text.training_batch({.seed = 3, .step = 5, .micro = 1}, 4);
  EXPECT_EQ(text.training_batch({.seed = 3, .step = 5, .micro = 1}, 4).inputs, batch.inputs);
  EXPECT_NE(text.training_batch({.seed = 4, .step = 5, .micro = 1}, 4).inputs, batch.inputs);
  EXPECT_NE(text.training_batch({.seed = 3, .step = 6, .micro = 1}, 4).inputs, batch.inputs);
  EXPECT_NE(text.training_batch({.seed = 3, .step = 5, .micro = 2}, 4).inputs, batch.inputs);
}

TEST_F(GptText, TrainingNeverSeesWhatIsHeldOut) {
  std::vector<std::uint8_t> bytes(2000, 't');
  for (std::size_t i = 1900; i < 2000; ++i) bytes[i] = 'h';
  const Text text = Text::from_bytes(std::move(bytes), "split", 16);
  for (std::uint64_t step = 0; step < 2000; ++step) {
    for (const std::uint8_t byte :
         text.training_batch({.seed = 1, .step = step, .micro = 0}, 1).targets)
      ASSERT_EQ(byte, 't');
  }
  EXPECT_EQ(text.held_out_count(), 6U);
  for (std::uint64_t i = 0; i < 10; ++i) {
    for (const std::uint8_t byte : text.held_out_batch(i, 2).targets) ASSERT_EQ(byte, 'h');
  }
  EXPECT_EQ(text.held_out_batch(0, 2).inputs, text.held_out_batch(3, 2).inputs)
      << "starts over at its end";
}

}  // namespace
}  // namespace ziggurat::gpt
