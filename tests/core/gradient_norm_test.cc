// SPDX-License-Identifier: Apache-2.0
// tests/core/gradient_norm_test.cc: every rank adds the same sums in the same order, holds each of
// them once, and finds parts whose shared gradients differ.
#include "core/schedule/gradients/gradient_norm.h"

#include <gtest/gtest.h>

#include <cstring>

#include "core/sharding/tensor_part.h"
#include "optimizer/gradient.h"
#include "tests/core/engine_harness.h"

namespace ziggurat::testing {
namespace gradient_norm_test {

float value_of(UnitId unit, std::uint64_t element) {
  return initial_value(unit, element) * static_cast<float>(1 + unit);
}

/// One rank's norm, with memory of its own.
struct Rank {
  Rank(const ModelSpec& model, const Sharding& sharding, int number)
      : table(model, 1000, {}, sharding),
        memory(GradientNorm::memory_bytes(table) / sizeof(double)),
        norm(table, number, std::as_writable_bytes(std::span(memory))) {}

  /// Rounds its slice of every unit; `fault` is added to the first value of the last unit.
  void round_slices(float fault = 0) {
    for (UnitId u = 0; u < table.unit_count(); ++u) {
      const std::uint64_t begin = table.own_begin(u);
      std::vector<float> values(table.unit(u).slice_count);
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = value_of(u, begin + i);
      if (u + 1 == table.unit_count()) values[0] += fault;
      std::vector<std::byte> rounded(values.size() * table.element_bytes(u));
      norm.round(u, begin, values, {table.dtype(u), rounded});
    }
    norm.finish_message();
  }

  ChunkTable table;
  std::vector<double> memory;
  GradientNorm norm;
};

/// As the all-gather of a step does it.
void exchange(std::vector<std::unique_ptr<Rank>>& ranks) {
  for (std::size_t to = 0; to < ranks.size(); ++to) {
    for (std::size_t from = 0; from < ranks.size(); ++from) {
      const auto number = static_cast<int>(from);
      std::ranges::copy(ranks[from]->norm.message(number), ranks[to]->norm.message(number).begin());
    }
  }
}

double plain_sum(const ChunkTable& table) {
  double sum = 0;
  for (UnitId u = 0; u < table.unit_count(); ++u) {
    for (std::uint64_t begin = 0; begin < table.unit(u).padded_count; begin += kTileElements) {
      std::vector<float> values(kTileElements);
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = value_of(u, begin + i);
      std::vector<std::byte> rounded(values.size() * table.element_bytes(u));
      sum += round_gradient(values, {table.dtype(u), rounded});
    }
  }
  return sum;
}

TEST(GradientNorm, IsTheSameSumOnEveryRankAndOfOne) {
  const ModelSpec model = small_model();
  for (const int world_size : {1, 2, 3}) {
    for (const int stage : {0, 2, 3}) {
      std::vector<std::unique_ptr<Rank>> ranks;
      for (int rank = 0; rank < world_size; ++rank) {
        const Sharding sharding = Sharding::of(stage, rank, world_size, 0);
        ranks.push_back(std::make_unique<Rank>(model, sharding, rank));
        ranks.back()->round_slices();
      }
      exchange(ranks);
      const double expected = plain_sum(ranks[0]->table);
      for (const auto& rank : ranks) {
        EXPECT_EQ(rank->norm.squared(), expected) << world_size << " ranks in stage " << stage;
        EXPECT_FALSE(rank->norm.difference());
      }
    }
  }
}

TEST(GradientNorm, HoldsEverySumOnce) {
  const ModelSpec model = small_model();
  for (const int world_size : {1, 3}) {
    const ChunkTable table(model, 1000, {}, Sharding::of(2, 0, world_size, 0));
    EXPECT_EQ(GradientNorm::memory_bytes(table),
              table.tile_count() * sizeof(double) +
                  static_cast<std::uint64_t>(world_size) * GradientNorm::kHeadBytes);
  }
}

TEST(GradientNorm, FindsThePartWhoseSharedGradientsDiffer) {
  ModelSpec whole{.name = "divided", .units = {}};
  whole.units.push_back(
      {.name = "columns", .params = {{.name = "columns.weight", .shape = {256, 96}, .tp_dim = 0}}});
  whole.units.push_back({.name = "shared", .params = {{.name = "norm", .shape = {300}}}});
  const ModelSpec model = part_of(whole, 2);
  for (const float fault : {0.0F, 0.5F}) {
    std::vector<std::unique_ptr<Rank>> ranks;
    for (int rank = 0; rank < 4; ++rank) {
      Sharding sharding = Sharding::of(2, rank / 2, 2, 0);
      sharding.tensor = {.rank = rank % 2, .ranks = 2};
      ranks.push_back(std::make_unique<Rank>(model, sharding, rank));
      ranks.back()->round_slices(rank == 1 ? fault : 0);
    }
    exchange(ranks);
    for (const auto& rank : ranks) {
      const auto found = rank->norm.difference();
      ASSERT_EQ(found.has_value(), fault != 0);
      if (!found) continue;
      EXPECT_EQ(found->unit, 1U);
      EXPECT_EQ(found->first_rank, 0);
      EXPECT_EQ(found->rank, 1);
    }
  }
}

// They are part of the host's account, and so of the smallest budget that an engine accepts.
TEST(GradientNorm, IsInTheHostsAccount) {
  const ScratchDirectory directory;
  const ModelSpec model = small_model();
  const Rig rig(model, small_config(directory.path()));
  EXPECT_GE(rig.engine->host_account().used_bytes(Purpose::kStaging),
            GradientNorm::memory_bytes(ChunkTable(model, 1000, {})));
}

}  // namespace gradient_norm_test
}  // namespace ziggurat::testing
