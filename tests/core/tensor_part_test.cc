// SPDX-License-Identifier: Apache-2.0
// tests/core/tensor_part_test.cc: parts of a model have every element of the whole, divided ones
// once, in the order that shapes and sections say.
#include "core/sharding/tensor_part.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "base/error.h"

namespace ziggurat {
namespace tensor_part_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

ModelSpec model() {
  return {"m",
          {{"unit",
            {{.name = "columns", .shape = {2, 12}, .tp_dim = 1, .tp_sections = 3},
             {.name = "rows", .shape = {4, 3}, .tp_dim = 0},
             {.name = "norm", .shape = {5}},
             {.name = "bias", .shape = {12}, .tp_dim = 0, .tp_sections = 3}}}}};
}

/// For each element of the part, its number in the whole unit.
std::vector<std::uint64_t> places(const UnitSpec& unit, TensorPart part, std::uint64_t first,
                                  std::uint64_t count) {
  std::vector<std::uint64_t> all;
  for_each_run(unit, part, first, count, [&](const PartRun& run) {
    EXPECT_EQ(run.begin, first + all.size());
    for (std::uint64_t i = 0; i < run.count; ++i) all.push_back(run.whole_begin + i);
  });
  return all;
}

TEST(TensorPart, DividesWhatIsMarkedAndLeavesTheRest) {
  const ModelSpec half = part_of(model(), 2);
  EXPECT_EQ(half.name, "m");
  EXPECT_THAT(half.units[0].params[0].shape, ElementsAre(2, 6));
  EXPECT_THAT(half.units[0].params[1].shape, ElementsAre(2, 3));
  EXPECT_THAT(half.units[0].params[2].shape, ElementsAre(5));
  EXPECT_THAT(half.units[0].params[3].shape, ElementsAre(6));
  EXPECT_EQ(part_of(model(), 1).count(), model().count());
}

TEST(TensorPart, OfFusedColumnsHasAPartOfEachSection) {
  const UnitSpec unit = part_of(model(), 2).units[0];
  EXPECT_THAT(places(unit, {.rank = 0, .ranks = 2}, 0, 12),
              ElementsAre(0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21));
  EXPECT_THAT(places(unit, {.rank = 1, .ranks = 2}, 0, 12),
              ElementsAre(2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23));
}

TEST(TensorPart, OfRowsIsOneRunAndWhatIsNotDividedIsThereForAll) {
  const UnitSpec unit = part_of(model(), 2).units[0];
  EXPECT_THAT(places(unit, {.rank = 1, .ranks = 2}, 12, 6), ElementsAre(30, 31, 32, 33, 34, 35));
  for (const int rank : {0, 1}) {
    EXPECT_THAT(places(unit, {.rank = rank, .ranks = 2}, 18, 5), ElementsAre(36, 37, 38, 39, 40));
  }
}

TEST(TensorPart, HasEveryElementOfTheWholeInOneOfTheParts) {
  for (const int ranks : {1, 2, 4}) {
    const ModelSpec spec{"m",
                         {{"unit",
                           {{.name = "a", .shape = {3, 24}, .tp_dim = 1, .tp_sections = 3},
                            {.name = "b", .shape = {8, 5}, .tp_dim = 0}}}}};
    const UnitSpec part = part_of(spec, ranks).units[0];
    std::vector<int> seen(spec.count());
    for (int rank = 0; rank < ranks; ++rank) {
      for (const std::uint64_t at : places(part, {rank, ranks}, 0, part.count())) ++seen.at(at);
    }
    EXPECT_THAT(seen, ::testing::Each(1)) << ranks;
  }
}

TEST(TensorPart, AnyRangeOfElementsIsFoundByItself) {
  const UnitSpec unit = part_of(model(), 2).units[0];
  const TensorPart part{.rank = 1, .ranks = 2};
  const std::vector<std::uint64_t> all = places(unit, part, 0, unit.count());
  for (std::uint64_t first = 0; first < unit.count(); ++first) {
    for (std::uint64_t count = 0; first + count <= unit.count(); ++count) {
      const std::vector<std::uint64_t> expected(
          all.begin() + static_cast<std::ptrdiff_t>(first),
          all.begin() + static_cast<std::ptrdiff_t>(first + count));
      ASSERT_EQ(places(unit, part, first, count), expected) << first << " + " << count;
    }
  }
}

TEST(TensorPart, SharesRunsThatAreNotDivided) {
  const auto runs = shared_runs(part_of(model(), 2).units[0]);
  ASSERT_EQ(runs.size(), 1u);
  EXPECT_EQ(runs[0].begin, 18u);
  EXPECT_EQ(runs[0].end, 23u);
}

TEST(TensorPart, OfADimensionThatDoesNotDivideIsRefusedWithTheArithmetic) {
  try {
    part_of(model(), 3);
    FAIL() << "divided";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("columns has 12 elements in 3 sections"));
    EXPECT_THAT(error.what(), HasSubstr("3 would be left over"));
  }
}

}  // namespace tensor_part_test
}  // namespace ziggurat
