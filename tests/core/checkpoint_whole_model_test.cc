// SPDX-License-Identifier: Apache-2.0
// tests/core/checkpoint_whole_model_test.cc: slices, parts and copies on several ranks come out as
// the model that they are of.
#include "core/checkpoint/whole_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "core/sharding/tensor_part.h"
#include "tests/core/ranks_harness.h"

namespace ziggurat::testing {
namespace {

ModelSpec two_units() {
  return {"m",
          {{"first",
            {{.name = "columns", .shape = {2, 12}, .tp_dim = 1, .tp_sections = 3},
             {.name = "norm", .shape = {5}}}},
           {"second", {{.name = "rows", .shape = {8, 3}, .tp_dim = 0}}}}};
}

/// Element e of the whole unit u has the value 100 u + e; here those of `part`, and of its slice.
std::vector<float> values_of(UnitId unit, TensorPart part, int slice, int slices) {
  const ModelSpec whole = two_units();
  const UnitSpec its = part_of(whole.units[unit], part.ranks);
  std::vector<float> values(its.count());
  for_each_run(its, part, 0, its.count(), [&](const PartRun& run) {
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(run.begin);
    std::iota(begin, begin + static_cast<std::ptrdiff_t>(run.count),
              static_cast<float>(100 * unit + run.whole_begin));
  });
  const std::size_t each =
      (values.size() + static_cast<std::size_t>(slices) - 1) / static_cast<std::size_t>(slices);
  const std::size_t first = std::min(values.size(), each * static_cast<std::size_t>(slice));
  const std::size_t last = std::min(values.size(), first + each);
  return {values.begin() + static_cast<std::ptrdiff_t>(first),
          values.begin() + static_cast<std::ptrdiff_t>(last)};
}

std::vector<float> whole_values(UnitId unit) { return values_of(unit, {}, 0, 1); }

struct Case {
  int ranks;
  WholeModel::Layout layout;
};
void PrintTo(const Case& its, std::ostream* out) {
  *out << its.ranks << "Ranks" << its.layout.slices << "Slices" << its.layout.parts << "Parts";
}

class WholeModelOf : public ::testing::TestWithParam<Case> {};

TEST_P(WholeModelOf, HasEveryElementInItsPlace) {
  const auto [ranks, layout] = GetParam();
  const auto runtimes = connected_runtimes(ranks, 1);
  std::vector<std::vector<float>> got(two_units().units.size());
  expect_none(run_ranks(ranks, [&](int rank) {
    Runtime& runtime = *runtimes[static_cast<std::size_t>(rank)];
    const TensorPart part{.rank = rank % layout.parts, .ranks = layout.parts};
    // In pieces of three.
    const auto read_own = [&](UnitId unit, const WholeModel::Consume& consume) {
      const std::vector<float> own =
          values_of(unit, part, rank / layout.parts % layout.slices, layout.slices);
      for (std::size_t i = 0; i < own.size(); i += 3)
        consume(std::span(own).subspan(i, std::min<std::size_t>(3, own.size() - i)));
    };
    WholeModel model(two_units(), layout, runtime.reactor, *runtime.ranks, read_own);
    for (UnitId unit = 0; unit < got.size(); ++unit) {
      model.read(unit, [&](std::span<const float> values) {
        ASSERT_EQ(rank, 0);
        got[unit].insert(got[unit].end(), values.begin(), values.end());
      });
    }
  }));
  for (UnitId unit = 0; unit < got.size(); ++unit) EXPECT_EQ(got[unit], whole_values(unit));
}

INSTANTIATE_TEST_SUITE_P(Layouts, WholeModelOf,
                         ::testing::Values(Case{1, {}}, Case{3, {.slices = 3}},
                                           Case{4, {.slices = 2}},  // and copies of both
                                           Case{2, {.parts = 2}},
                                           Case{4, {.slices = 2, .parts = 2}}));

}  // namespace
}  // namespace ziggurat::testing
