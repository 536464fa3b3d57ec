// SPDX-License-Identifier: Apache-2.0
// tests/core/checkpoint_piece_test.cc: elements of pieces are those of the whole, however it is
// cut.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "core/checkpoint/shard_plan.h"
#include "core/checkpoint/tensor_piece.h"

namespace ziggurat {
namespace checkpoint_piece_test {

using Shape = std::vector<std::int64_t>;

/// Where each element of a box lies in the whole, one by one.
std::vector<std::uint64_t> places_of(const Shape& shape, const TensorBox& box) {
  std::vector<std::uint64_t> places;
  for (std::uint64_t i = 0; i < box.count(); ++i) {
    std::uint64_t left = i;
    std::uint64_t place = 0;
    std::uint64_t stride = 1;
    for (std::size_t d = shape.size(); d-- > 0;) {
      const auto size = static_cast<std::uint64_t>(box.shape[d]);
      place += (static_cast<std::uint64_t>(box.offsets[d]) + left % size) * stride;
      left /= size;
      stride *= static_cast<std::uint64_t>(shape[d]);
    }
    places.push_back(place);
  }
  return places;
}

std::vector<std::uint64_t> places_of(const TensorPiece& piece) {
  std::vector<std::uint64_t> places;
  for (const TensorBox& box : piece.boxes) {
    const std::vector<std::uint64_t> its = places_of(piece.shape, box);
    places.insert(places.end(), its.begin(), its.end());
  }
  return places;
}

/// A slice or a box of a tensor of up to four dimensions.
TensorPiece drawn(std::mt19937& draws) {
  const auto up_to = [&](std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(0, most)(draws);
  };
  TensorPiece piece{.name = "weight", .shape = {}, .boxes = {}};
  for (std::int64_t d = up_to(4); d > 0; --d) piece.shape.push_back(1 + up_to(5));
  const auto whole = static_cast<std::int64_t>(whole_box(piece.shape).count());
  if (up_to(1) == 0) {
    const std::int64_t first = up_to(whole - 1);
    const std::int64_t count = 1 + up_to(whole - first - 1);
    piece.boxes =
        boxes_of(piece.shape, static_cast<std::uint64_t>(first), static_cast<std::uint64_t>(count));
    return piece;
  }
  TensorBox box;
  for (const std::int64_t size : piece.shape) {
    box.offsets.push_back(up_to(size - 1));
    box.shape.push_back(1 + up_to(size - box.offsets.back() - 1));
  }
  piece.boxes.push_back(std::move(box));
  return piece;
}

TEST(TensorPiece, RunsHaveTheElementsOfThePieceInItsOrder) {
  std::mt19937 draws(1);
  for (int i = 0; i < 20'000; ++i) {
    const TensorPiece piece = drawn(draws);
    const std::vector<std::uint64_t> places = places_of(piece);
    ASSERT_EQ(places.size(), piece.count());
    const std::uint64_t first = draws() % places.size();
    const std::uint64_t count = 1 + draws() % (places.size() - first);
    const std::uint64_t at = draws() % 7;
    std::vector<std::uint64_t> found(at + count, UINT64_MAX);
    for (const TensorRun& run : whole_runs(piece, {.first = first, .count = count, .at = at})) {
      ASSERT_LE(run.at + run.count, found.size());
      std::iota(found.begin() + static_cast<std::ptrdiff_t>(run.at),
                found.begin() + static_cast<std::ptrdiff_t>(run.at + run.count), run.first);
    }
    for (std::uint64_t k = 0; k < count; ++k)
      ASSERT_EQ(found[at + k], places[first + k]) << "piece " << i << ", element " << k;
  }
}

/// The slice of 8 elements in a row that begins at `first`.
TensorPiece slice(std::uint64_t first, std::uint64_t count) {
  const Shape row{8};
  return {.name = "weight", .shape = row, .boxes = boxes_of(row, first, count)};
}

TEST(TensorPiece, CoverNumbersAddUpToTheWholesWhereNothingIsMissing) {
  std::mt19937 draws(2);
  for (int i = 0; i < 2'000; ++i) {
    const TensorPiece piece = drawn(draws);
    TensorPiece whole = piece;
    whole.boxes = {whole_box(piece.shape)};
    // The elements that the piece leaves out, one by one.
    std::vector<bool> has(whole.count());
    for (const std::uint64_t place : places_of(piece)) has[place] = true;
    std::uint64_t sum = cover_number(piece);
    const bool lacks = std::ranges::count(has, false) > 0;
    ASSERT_EQ(sum == cover_number(whole), !lacks) << "piece " << i;
    for (std::uint64_t place = 0; place < has.size(); ++place) {
      if (has[place]) continue;
      sum += cover_number(
          {.name = "weight", .shape = piece.shape, .boxes = boxes_of(piece.shape, place, 1)});
    }
    ASSERT_EQ(sum, cover_number(whole)) << "piece " << i;
  }
}

TEST(TensorPiece, CoverNumbersOfPiecesThatOverlapAreNotTheWholes) {
  const std::uint64_t whole = cover_number(slice(0, 8));
  EXPECT_EQ(cover_number(slice(0, 3)) + cover_number(slice(3, 5)), whole);
  EXPECT_EQ(2 * cover_number(slice(0, 8)), 2 * whole);
  // As many elements as the whole has, and their numbers add up to the same.
  EXPECT_NE(2 * cover_number(slice(2, 4)), whole);
  std::uint64_t twice = 0;  // and their squares too
  for (const std::uint64_t place : {0, 3, 5, 6}) twice += 2 * cover_number(slice(place, 1));
  EXPECT_NE(twice, whole);
}

TEST(TensorPiece, ASliceOfAMatrixIsPlannedOnceAFile) {
  const std::vector<StateTensor> tensors{
      {.name = "weight", .owner = "weight", .array = "master", .shape = {4, 5}}};
  const std::vector<TensorBoxes> boxes{{.tensor = 0, .boxes = boxes_of(tensors[0].shape, 3, 13)}};
  const ShardPlan plan = plan_boxes(tensors, boxes, {.rank = 1, .ranks = 2});
  ASSERT_EQ(plan.pieces.size(), 3U);  // the rest of a row, whole rows, the beginning of another
  ASSERT_EQ(plan.files.size(), 3U);
  std::uint64_t count = 0;
  for (const StatePiece& piece : plan.pieces) count += piece.box.count();
  EXPECT_EQ(count, 13U);
  EXPECT_EQ(plan.files[2].name, "rank-00001-of-00002-00002.safetensors");
}

}  // namespace checkpoint_piece_test
}  // namespace ziggurat
