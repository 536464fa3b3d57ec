// SPDX-License-Identifier: Apache-2.0
// tests/core/checkpoint_tensors_test.cc: thousands of tensors: what looks them up by an index finds
// what a walk over all of them would.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "core/checkpoint/piece_source.h"
#include "core/checkpoint/proven_bytes.h"
#include "core/checkpoint/safetensors_header.h"
#include "core/checkpoint/safetensors_writer.h"
#include "core/checkpoint/shard_plan.h"

namespace ziggurat {
namespace checkpoint_tensors_test {

using nlohmann::ordered_json;

std::vector<StateTensor> many_tensors(std::size_t count, std::mt19937& random) {
  std::vector<StateTensor> tensors;
  for (std::size_t t = 0; t < count; ++t) {
    const std::string name = fmt::format("layer {} \"{}\"\u00e9", t / 7, t);
    tensors.push_back({.name = name,
                       .owner = name,
                       .array = "master",
                       .type = t % 3 == 0 ? TensorType::kF16 : TensorType::kF32,
                       .shape = {static_cast<std::int64_t>(1 + random() % 9), 3}});
  }
  return tensors;
}

/// Each box goes to the first file with room for it that has nothing of its tensor.
std::vector<std::vector<std::uint32_t>> first_fit(const std::vector<StateTensor>& tensors,
                                                  const std::vector<TensorBoxes>& parts,
                                                  std::uint64_t bytes_max) {
  struct File {
    std::set<std::uint32_t> has;
    std::uint64_t bytes = 0;
  };
  std::vector<File> files;
  std::vector<std::vector<std::uint32_t>> dealt;
  for (const TensorBoxes& part : parts) {
    for (const TensorBox& box : part.boxes) {
      const std::uint64_t bytes = box.count() * size_bytes(tensors[part.tensor].type);
      std::size_t f = 0;
      while (f < files.size() &&
             (files[f].bytes + bytes > bytes_max || files[f].has.contains(part.tensor)))
        ++f;
      if (f == files.size()) {
        files.emplace_back();
        dealt.emplace_back();
      }
      files[f].has.insert(part.tensor);
      files[f].bytes += bytes;
      dealt[f].push_back(part.tensor);
    }
  }
  return dealt;
}

TEST(ManyTensors, AreDealtToTheFirstFileWithRoom) {
  for (const std::uint64_t bytes_max : {120U, 500U, 5'000U, 4'000'000U}) {
    std::mt19937 random(3);
    const std::vector<StateTensor> tensors = many_tensors(3'000, random);
    std::vector<TensorBoxes> parts;
    for (std::uint32_t t = 0; t < tensors.size(); ++t) {
      // Some tensors have two pieces, which may not lie in one file.
      const std::int64_t rows = tensors[t].shape[0];
      const std::int64_t first =
          random() % 4 == 0 ? 1 + static_cast<std::int64_t>(random()) % rows : rows;
      parts.push_back({.tensor = t, .boxes = {{{0, 0}, {first, 3}}}});
      if (first < rows) parts.back().boxes.push_back({{first, 0}, {rows - first, 3}});
    }
    const ShardPlan plan = plan_boxes(tensors, parts, {}, bytes_max);
    std::vector<std::vector<std::uint32_t>> expected = first_fit(tensors, parts, bytes_max);
    std::vector<std::vector<std::uint32_t>> dealt(plan.files.size());
    for (const StatePiece& piece : plan.pieces) dealt.at(piece.file).push_back(piece.tensor);
    for (auto& file : dealt) std::ranges::sort(file);
    for (auto& file : expected) std::ranges::sort(file);
    ASSERT_EQ(dealt, expected) << bytes_max;
    for (std::size_t f = 0; f < plan.files.size(); ++f) {
      std::uint64_t end = plan.files[f].header_bytes;
      for (const StatePiece& piece : plan.pieces) {
        if (piece.file != f) continue;
        EXPECT_EQ(piece.offset_bytes, end);
        end += piece.box.count() * size_bytes(tensors[piece.tensor].type);
      }
      EXPECT_EQ(end, plan.files[f].size_bytes);
    }
    if (bytes_max > 5'000) continue;  // files by the hundred are all looked at above
    EXPECT_GT(plan.files.size(), 10U);
  }
}

/// What readers of the format and PyTorch's distributed checkpoint get, byte for byte.
TEST(ManyTensors, HaveTheHeadersThatAnOrderedObjectHas) {
  std::mt19937 random(5);
  const std::vector<StateTensor> tensors = many_tensors(500, random);
  const ShardPlan plan = plan_whole_tensors(tensors);
  ASSERT_EQ(plan.headers.size(), 1U);
  ordered_json offsets = ordered_json::object();
  ordered_json header = ordered_json::object();
  header["__metadata__"] = nullptr;
  std::uint64_t at = 0;
  for (const StatePiece& piece : plan.pieces) {
    const StateTensor& tensor = tensors[piece.tensor];
    offsets[tensor.name]["saved_offsets"] = piece.box.offsets;
    header[tensor.name] = {{"dtype", to_string(tensor.type)},
                           {"shape", tensor.shape},
                           {"data_offsets", {at, at + tensor.size_bytes()}}};
    at += tensor.size_bytes();
  }
  header["__metadata__"] = {{"DCP_SHARDING_INFO", offsets.dump()}, {"format", "pt"}};
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  EXPECT_EQ(plan.headers[0].substr(kSafetensorsLengthBytes), text);
  EXPECT_EQ(parse_safetensors_header(text, at, "here").tensors.size(), tensors.size());
}

TEST(ManyTensors, WithNamesThatAreNoTextAreRefused) {
  EXPECT_THROW(
      safetensors_header(std::vector<SafetensorsTensor>{{.name = "\xff", .shape = {}}}, {}), Error);
  EXPECT_THROW(safetensors_header({}, {{"format", "\xff"}}), Error);
  EXPECT_EQ(safetensors_header({}, {}).substr(kSafetensorsLengthBytes), "{}      ");
}

/// Whose tensors' values are their numbers.
class NumberedSource final : public StateSource {
 public:
  explicit NumberedSource(StateContent content) : content_(std::move(content)) {}
  const StateContent& content() const noexcept override { return content_; }
  Task<> read(std::size_t tensor, std::span<const TensorRun> runs,
              std::span<std::byte> array) override {
    const auto value = static_cast<float>(tensor);
    for (const TensorRun& run : runs) {
      for (std::uint64_t i = 0; i < run.count; ++i)
        std::memcpy(&array[(run.at + i) * sizeof(value)], &value, sizeof(value));
    }
    co_return;
  }
  std::string place() const override { return "numbers"; }

 private:
  StateContent content_;
};

TEST(ManyTensors, OfPiecesComeFromTheirParametersOfTheWhole) {
  constexpr std::size_t kParams = 3'000;
  StateContent whole;
  std::vector<PieceSource::Param> params;
  for (std::size_t p = 0; p < kParams; ++p) {
    const std::string owner = fmt::format("whole {}", p);
    whole.tensors.push_back({.name = owner, .owner = owner, .array = "master", .shape = {2}});
    params.push_back({.name = fmt::format("own {}", kParams - 1 - p),
                      .shape = {2},
                      .part = {.name = fmt::format("whole {}", kParams - 1 - p),
                               .shape = {2},
                               .boxes = {whole_box(std::vector<std::int64_t>{2})}}});
  }
  for (std::size_t p = 0; p < kParams; p += 2) {
    const std::string owner = fmt::format("whole {}", p);
    whole.tensors.push_back({.name = state_tensor_name("exp_avg", owner),
                             .owner = owner,
                             .array = "exp_avg",
                             .shape = {2}});
  }
  NumberedSource numbers(whole);
  const PieceSource::ReadOwn none = [](std::size_t, std::uint64_t, std::span<float>) { FAIL(); };
  PieceSource source(numbers, params, {}, none);
  ASSERT_EQ(source.content().tensors.size(), whole.tensors.size());
  std::map<std::string, std::size_t> numbered;
  for (std::size_t t = 0; t < whole.tensors.size(); ++t) numbered[whole.tensors[t].name] = t;
  Reactor reactor;
  for (std::size_t t = 0; t < source.content().tensors.size(); ++t) {
    const StateTensor& its = source.content().tensors[t];
    std::vector<float> values(2);
    const TensorRun run{.first = 0, .count = 2, .at = 0};
    reactor.block_on(source.read(t, std::span(&run, 1), std::as_writable_bytes(std::span(values))));
    std::string name = its.name;
    name.replace(name.find("own"), 3, "whole");
    ASSERT_EQ(values[0], static_cast<float>(numbered.at(name))) << its.name;
  }
}

class KeptBytes : public ::testing::Test {
 protected:
  static constexpr std::size_t kPages = 64;

  /// Reads key `i`'s 16 bytes through the cache.
  void get(std::size_t i) {
    const ProvenBytes::Read read = [&](std::span<std::byte> into) -> Task<> {
      ++reads_[i];
      std::ranges::fill(into, static_cast<std::byte>(i));
      co_return;
    };
    reactor_.block_on(
        [](ProvenBytes& from, std::size_t key, const ProvenBytes::Read& its) -> Task<> {
          const ProvenBytes::Bytes bytes = co_await from.get({key, 0}, {.bytes = 16}, its);
          EXPECT_EQ(bytes->span()[15], static_cast<std::byte>(key));
        }(bytes_, i, read));
  }

  Reactor reactor_;
  AlignedPool memory_;
  ProvenBytes bytes_{reactor_, memory_, kPages* AlignedBytes::kAlignment};
  std::map<std::size_t, int> reads_;
};

/// However small they are, they have a page each: 32 MiB of 64 bytes would be 2 GiB of pages.
TEST_F(KeptBytes, AreAsManyAsTheirPagesAllow) {
  for (std::size_t i = 0; i < 2 * kPages; ++i) get(i);
  for (std::size_t i = 2 * kPages; i-- > kPages;) get(i);  // still there
  for (std::size_t i = kPages; i < 2 * kPages; ++i) EXPECT_EQ(reads_[i], 1) << i;
  get(0);
  EXPECT_EQ(reads_[0], 2) << "it had gone";
  get(2 * kPages - 1);  // used longest ago, of those that are there
  EXPECT_EQ(reads_[2 * kPages - 1], 2);
}

}  // namespace checkpoint_tensors_test
}  // namespace ziggurat
