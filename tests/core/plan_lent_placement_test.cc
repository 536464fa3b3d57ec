// SPDX-License-Identifier: Apache-2.0
// tests/core/plan_lent_placement_test.cc: where the state of a trainer that lends its memory is
// kept, by what it takes and what memory there is; and what is said where nothing fits.
#include "core/plan/lent_placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/memory_exhausted.h"
#include "core/sharding/chunk_table.h"

namespace ziggurat {
namespace plan_lent_placement_test {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr std::int64_t kMillion = 1 << 20;  // elements: 12 MiB of state, 2 MiB of parameters

/// Parameters in bf16.
ModelSpec model_of(const std::vector<std::int64_t>& counts) {
  ModelSpec model{.name = "m", .units = {}};
  for (std::size_t p = 0; p < counts.size(); ++p) {
    const std::string name = "p" + std::to_string(p);
    model.units.push_back({.name = name, .params = {{.name = name, .shape = {counts[p]}}}});
  }
  return model;
}
/// A model that the engine keeps, `trained` parameters of 2 MiB and then `frozen` ones.
ModelSpec streamed_model(std::size_t trained, std::size_t frozen) {
  ModelSpec model = model_of(std::vector<std::int64_t>(trained + frozen, kMillion));
  for (std::size_t p = 0; p < model.units.size(); ++p) {
    model.units[p].params[0].streamed = static_cast<std::uint32_t>(p);
    model.units[p].params[0].frozen = p >= trained;
  }
  return model;
}

std::string chosen(const LentPlacementRequest& request) {
  const Placement placement = choose_lent_placement(request).placement;
  EXPECT_EQ(placement.grads, Tier::kHost);
  return std::string(to_string(placement.params)) + " " +
         std::string(to_string(placement.optimizer));
}
std::string why(const LentPlacementRequest& request) { return choose_lent_placement(request).why; }

template <class Kind>
Kind refused(const LentPlacementRequest& request) {
  try {
    choose_lent_placement(request);
  } catch (const Kind& error) {
    return error;
  }
  throw std::logic_error("something was chosen");
}

LentPlacementRequest lent(std::uint64_t free_bytes, bool has_store = true) {
  return {.model = model_of({kMillion}), .has_store = has_store, .free_bytes = free_bytes};
}
LentPlacementRequest within(std::uint64_t host_budget_bytes, bool has_store = true) {
  return {.model = model_of({kMillion}),
          .has_store = has_store,
          .host_budget_bytes = host_budget_bytes};
}

TEST(LentPlacement, IsTheHostWhereTheStateTakesUpToHalfOfTheFreeMemory) {
  EXPECT_EQ(chosen(lent(24 * kMiB)), "host host");
  EXPECT_EQ(chosen(lent(24 * kMiB, /*has_store=*/false)), "host host");
  EXPECT_EQ(chosen(lent(24 * kMiB - 2)), "host nvme");
  for (const std::uint64_t free_bytes : {24 * kMiB, 20 * kMiB}) {
    EXPECT_EQ(why(lent(free_bytes)), "the state takes 12.0 MiB, and may take up to half of the " +
                                         format_bytes(free_bytes) + " of free memory");
  }
}

TEST(LentPlacement, SaysWhatWouldHelpWhereTheStateDoesNotFitAndThereIsNoStore) {
  const Error error = refused<Error>(lent(20 * kMiB, /*has_store=*/false));
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_STREQ(error.what(),
               "`placement=auto`: the state takes 12.0 MiB, and may take up to half of the 20.0 "
               "MiB of free memory. Give `store`, a directory on a drive, or "
               "`placement=optimizer=host` to take the memory all the same");
}

TEST(LentPlacement, CountsWhatAllRanksOfTheMachineTake) {
  LentPlacementRequest request = lent(48 * kMiB);
  request.node_ranks = 2;
  EXPECT_EQ(chosen(request), "host host");
  EXPECT_THAT(why(request), StartsWith("the state of the 2 ranks on this machine takes 24.0 MiB,"));
  request.node_ranks = 3;
  EXPECT_EQ(chosen(request), "host nvme");
}

TEST(LentPlacement, IsDecidedByTheBudgetAloneIfThereIsOne) {
  EXPECT_EQ(chosen(within(12 * kMiB)), "host host");
  EXPECT_EQ(why(within(13 * kMiB)), "the state takes 12.0 MiB of `host_memory` 13.0 MiB");
  EXPECT_EQ(chosen(within(12 * kMiB - 1)), "host nvme");
  EXPECT_EQ(why(within(8 * kMiB)),
            "`host_memory` 8.0 MiB is too small for the state, which needs 12.0 MiB");
}

TEST(LentPlacement, SaysTheSmallestBudgetWhereNoneFits) {
  const auto without = refused<MemoryExhausted>(within(8 * kMiB, /*has_store=*/false));
  EXPECT_EQ(without.shortage().smallest_bytes, 12 * kMiB);
  EXPECT_THAT(without.what(), StartsWith("`host_memory` 8.0 MiB is too small; the smallest that "
                                         "works with these settings is 12 MiB"));
  EXPECT_THAT(without.what(), EndsWith(". Give that much, or `store`, a directory on a drive"));
  const auto with = refused<MemoryExhausted>(within(4 * kKiB));
  EXPECT_LT(with.shortage().smallest_bytes, 1 * kMiB) << "that of a state on NVMe";
}

TEST(LentPlacement, KeepsAStateOnNvmeThatIsNotDurableAtEveryStep) {
  LentPlacementRequest request = lent(kGiB);
  request.durable_every_steps = 4;
  EXPECT_EQ(chosen(request), "host nvme");
  EXPECT_EQ(why(request), "`durable_every_steps=4` needs the state on NVMe");
  request.has_store = false;
  EXPECT_THAT(refused<Error>(request).what(), StartsWith("`store` is missing"));
  // The parameters may be anywhere.
  request.has_store = true;
  request.model = streamed_model(1, 0);
  EXPECT_EQ(chosen(request), "host nvme");
  EXPECT_EQ(why(request),
            "`durable_every_steps=4` needs the state on NVMe; the streamed parameters take 2.0 "
            "MiB, and may take up to half of the 1.00 GiB of free memory");
  request.free_bytes = 3 * kMiB;
  EXPECT_EQ(chosen(request), "nvme nvme");
}

TEST(LentPlacement, TakesRecordsOutOfHostMemoryBeforeStreamedParameters) {
  LentPlacementRequest request{.model = streamed_model(2, 0), .has_store = true};
  request.free_bytes = 56 * kMiB;
  EXPECT_EQ(chosen(request), "host host");
  EXPECT_EQ(why(request),
            "the state and the streamed parameters take 28.0 MiB, and may take up to half of the "
            "56.0 MiB of free memory");
  request.free_bytes = 55 * kMiB;
  EXPECT_EQ(chosen(request), "host nvme");
  EXPECT_THAT(why(request), EndsWith("; the streamed parameters alone take 4.0 MiB"));
  request.free_bytes = 7 * kMiB;
  EXPECT_EQ(chosen(request), "nvme nvme");
  EXPECT_THAT(why(request), EndsWith(" of the 7.0 MiB of free memory"));
}

// As a large base under small adapters.
TEST(LentPlacement, KeepsAStateInHostMemoryWhoseFrozenParametersDoNotFitThere) {
  LentPlacementRequest request{
      .model = streamed_model(1, 40), .has_store = true, .free_bytes = 30 * kMiB};
  EXPECT_EQ(chosen(request), "nvme host");
  EXPECT_EQ(why(request),
            "the state and the streamed parameters take 94.0 MiB, and may take up to half of the "
            "30.0 MiB of free memory; the state alone takes 12.0 MiB");
}

TEST(LentPlacement, OfFrozenParametersAloneIsAboutTheseAlone) {
  LentPlacementRequest request{.model = streamed_model(0, 4), .free_bytes = 16 * kMiB};
  EXPECT_EQ(chosen(request), "host host");
  EXPECT_THAT(why(request), StartsWith("the streamed parameters take 8.0 MiB, and"));
  request.durable_every_steps = 4;  // no step will be made
  EXPECT_EQ(chosen(request), "host host");
  request.free_bytes = 15 * kMiB;
  EXPECT_THAT(refused<Error>(request).what(), HasSubstr("Give `store`"));
  request.has_store = true;
  EXPECT_EQ(chosen(request), "nvme host");
}

TEST(LentPlacement, CountsSmallParametersTogetherAndEachFormatForItself) {
  LentPlacementRequest request{.model = model_of(std::vector<std::int64_t>(100, 16))};
  request.free_bytes = kGiB;
  EXPECT_EQ(choose_lent_placement(request).state_bytes, 192 * kKiB) << "one tile";
  request.state.format = StateFormat::kBf16;
  EXPECT_EQ(choose_lent_placement(request).state_bytes, 128 * kKiB) << "96 KiB in whole blocks";
  request.state.format = StateFormat::kFp32;
  request.state.optimizer = OptimizerKind::kLion;
  EXPECT_EQ(choose_lent_placement(request).state_bytes, 128 * kKiB) << "a master and one moment";
}

TEST(LentPlacement, CountsTheRecordsOfTheStoreThatIsThere) {
  LentPlacementRequest request{.model = model_of(std::vector<std::int64_t>(100, 16)),
                               .state = {.format = StateFormat::k8Bit},
                               .has_store = true,
                               .free_bytes = kGiB};
  EXPECT_EQ(chosen(request), "host host");
  EXPECT_EQ(choose_lent_placement(request).state_bytes, 128 * kKiB) << "one record for all";
  ModelSpec alone = request.model;  // as stores of earlier versions
  for (ParamId p = 0; p < 100; ++p) alone.units[p].params[0].lent = p;
  request.layout = ChunkTable(alone, 8, request.state).layout();
  EXPECT_EQ(choose_lent_placement(request).state_bytes, 100 * 128 * kKiB);
  EXPECT_EQ(chosen(request), "host nvme");
  EXPECT_EQ(why(request), "the directory already has a store");
}

TEST(LentPlacement, GivesAStateOnNvmeAnEighthOfTheFreeMemoryIfThatKeepsRecords) {
  const auto beside = [](std::uint64_t free_bytes, std::uint64_t ranks = 1) {
    LentPlacementRequest request = lent(free_bytes);
    request.node_ranks = ranks;
    return choose_lent_placement(request).beside_nvme_bytes;
  };
  EXPECT_EQ(beside(64 * kGiB), 140 * kMiB) << "all of the state, and 128 MiB to work in";
  EXPECT_EQ(beside(1026 * kMiB), 1026 * kMiB / 8);
  EXPECT_EQ(beside(1024 * kMiB), 0U) << "only room to work in";
  EXPECT_EQ(beside(2052 * kMiB, 2), 1026 * kMiB / 8);
  LentPlacementRequest streamed{.model = streamed_model(1, 1), .free_bytes = 64 * kGiB};
  EXPECT_EQ(choose_lent_placement(streamed).beside_nvme_bytes, 144 * kMiB)
      << "and the parameters, which stay in host memory too";
}

}  // namespace plan_lent_placement_test
}  // namespace ziggurat
