// SPDX-License-Identifier: Apache-2.0
// tests/core/steps_blob_test.cc: what stands before a trainer's blob, and how the blobs
// of several ranks become one.
#include "core/checkpoint/steps_blob.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string_view>
#include <utility>

#include "base/error.h"

namespace ziggurat {
namespace steps_blob_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::byte> bytes_of(std::string_view text) {
  std::vector<std::byte> bytes(text.size());
  std::ranges::transform(text, bytes.begin(), [](char c) { return static_cast<std::byte>(c); });
  return bytes;
}

std::vector<std::byte> blob_of(std::vector<std::uint64_t> steps, std::string_view own,
                               std::uint64_t of_ranks = 0) {
  const std::vector<std::byte> its = bytes_of(own);
  return StepsBlob{.steps = std::move(steps), .of_ranks = of_ranks, .own = its}.written();
}

std::string own_of(const StepsBlob& blob) {
  std::string text;
  for (const std::byte byte : blob.own) text += static_cast<char>(byte);
  return text;
}

std::string refusal(const std::function<void()>& call, ErrorCode code) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    return error.what();
  }
  return "taken";
}

TEST(StepsBlob, IsReadAsItWasWritten) {
  for (const std::uint64_t ranks : {0U, 3U}) {
    const std::vector<std::byte> written = blob_of({4, 0}, "own", ranks);
    EXPECT_LE(written.size(), StepsBlob::head_bytes(2) + 3);
    const StepsBlob read = StepsBlob::read(written, 2);
    EXPECT_THAT(read.steps, ElementsAre(4, 0));
    EXPECT_EQ(read.of_ranks, ranks);
    EXPECT_EQ(own_of(read), "own");
  }
  EXPECT_THAT(StepsBlob::read({}, 2).steps, ElementsAre(0, 0));
}

TEST(StepsBlob, ThatIsShortOrAnotherOnesIsRefused) {
  const std::vector<std::byte> whole = blob_of({4, 1}, "", 2);
  for (std::size_t size = 1; size < whole.size(); ++size) {
    EXPECT_NE(
        refusal([&] { StepsBlob::read(std::span(whole).first(size), 2); }, ErrorCode::kDataLoss),
        "taken");
  }
  EXPECT_NE(refusal([&] { StepsBlob::read(whole, 3); }, ErrorCode::kDataLoss), "taken");
}

TEST(JoinedBlob, HasCountsByTensorsAndAllElseFromRank0) {
  const std::vector<std::byte> first = blob_of({5, 3}, "of rank 0");
  const std::vector<std::byte> second = blob_of({0, 3, 7}, "of rank 1");
  const std::vector<StoredRank> ranks{{.wholes = {"a", "b"}, .blob = first},
                                      {.wholes = {"", "b", "c"}, .blob = second}};
  const std::vector<std::byte> joined = joined_blob(ranks, {"c", "", "a", "b"});
  const StepsBlob its = StepsBlob::read(joined, 4);
  EXPECT_THAT(its.steps, ElementsAre(7, 0, 5, 3));
  EXPECT_EQ(its.of_ranks, 2U);
  EXPECT_EQ(own_of(its), "of rank 0");
  // Divided again before a step: it is still the blob of one of the first ranks.
  const std::vector<StoredRank> again{{.wholes = {"c", "", "a", "b"}, .blob = joined}};
  EXPECT_EQ(StepsBlob::read(joined_blob(again, {"a"}), 1).of_ranks, 2U);
}

TEST(JoinedBlob, IsRefusedWhereRanksCountOtherwise) {
  const std::vector<std::byte> first = blob_of({5}, "");
  const std::vector<std::byte> second = blob_of({4}, "");
  const std::vector<StoredRank> ranks{{.wholes = {"a"}, .blob = first},
                                      {.wholes = {"a"}, .blob = second}};
  EXPECT_THAT(refusal([&] { joined_blob(ranks, {"a"}); }, ErrorCode::kUnimplemented),
              HasSubstr("5 and 4 steps"));
}

}  // namespace steps_blob_test
}  // namespace ziggurat
