// SPDX-License-Identifier: Apache-2.0
// tests/optimizer/shared_record_test.cc: parameters that share a record in 8 bits have blocks of
// codes of their own: each keeps the bits that it has in a record alone, in every instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "optimizer/state_arrays.h"
#include "optimizer/state_values.h"
#include "tests/optimizer/state.h"
#include "tests/support/typed_array.h"
#include "tiers/store/record_hash.h"

namespace ziggurat::testing {
namespace shared_record_test {

using enum StateFormat;

constexpr std::size_t kTile = kTileElements;
constexpr std::size_t kSharedTiles = 2;
constexpr float kAccumulator = 0.125F;

/// Where parameters lie in the shared record: short ones, one of whole blocks, and one of two
/// tiles. In the second step the third and the last have no gradient.
struct Part {
  std::size_t begin, count;
  bool left_out = false;
};
const std::vector<Part> kParts{{0, 10},
                               {16, 1},
                               {32, 16, true},
                               {256, 300},
                               {560, 16},
                               {768, 512},
                               {1280, 256},
                               {kTile - 512, 999},
                               {kTile + 496, 7, true}};

std::vector<float> drawn(std::size_t count, float size, std::size_t seed) {
  std::mt19937 random(static_cast<std::uint32_t>(seed));
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = size * normal(random);
  return values;
}

/// A record, and the parameters and gradients of as many elements.
struct Record {
  StateKind state;
  TypedArray params;
  TypedArray grads;
  std::vector<std::byte> bytes{};

  Record(const StateKind& kind, std::size_t count)
      : state(kind), params(DType::kBFloat16, count), grads(DType::kFloat32, count) {
    const std::size_t tiles = (count + kTile - 1) / kTile;
    bytes.resize(record_format(state).record_bytes(tiles));
    const bool sums = state.optimizer == OptimizerKind::kAdagrad;
    write_record(state, std::vector<float>(tiles * kTile), bytes, sums ? kAccumulator : 0);
  }
  UpdateHashes step(const OptimizerStep& step, std::span<const DecayRun> runs,
                    const UpdateHashing* hashing) {
    return update_record(step,
                         {.format = k8Bit,
                          .own_blocks = state.own_blocks,
                          .record = bytes,
                          .grad = grads.span(),
                          .param = params.span()},
                         runs, hashing);
  }
  void give(std::size_t begin, std::span<const float> gradient) {
    for (std::size_t i = 0; i < gradient.size(); ++i) grads.set(begin + i, gradient[i]);
  }
  std::vector<std::byte> array(std::size_t index, std::size_t begin, std::size_t count) const {
    const StateArray its = state_arrays(state)[index];
    std::vector<std::byte> values((count + its.block - 1) / its.block * its.element_bytes());
    read_state_array(state, index, bytes, begin, values);
    return values;
  }
};

/// All parameters in one record, and each in one alone.
class Records {
 public:
  explicit Records(OptimizerKind kind, Roundings rounding)
      : kind_(kind), rounding_(rounding), shared({kind, k8Bit, true}, kSharedTiles * kTile) {
    for (std::size_t p = 0; p < kParts.size(); ++p) {
      const std::vector<float> masters = drawn(kParts[p].count, 0.5F, p);
      Record& own = alone.emplace_back(StateKind{kind, k8Bit}, kParts[p].count);
      write_state_values(own.state, 0, 0, masters, own.bytes);
      write_state_values(shared.state, 0, kParts[p].begin, masters, shared.bytes);
    }
  }

  void step(std::uint64_t number, const UpdateHashing* hashing) {
    OptimizerStep::Settings settings = usual_settings(kind_);
    settings.rounding = rounding_;
    settings.t = number;
    if (number == 3) settings.eps = 0;  // what lies between would be 0 / 0
    const OptimizerStep step = OptimizerStep::make(settings);
    std::vector<DecayRun> runs;
    std::ranges::fill(shared.grads.bytes, std::byte{0xff});  // NaN
    for (std::size_t p = 0; p < kParts.size(); ++p) {
      const auto [begin, count, left_out] = kParts[p];
      between(begin, runs);
      const bool skipped = left_out && number == 2;
      DecayRun run{begin, begin + count, p % 2 == 0};
      run.place = ParamPlace{.name = p + 1};
      run.skipped = skipped;
      runs.push_back(run);
      if (skipped) continue;
      const std::vector<float> gradient = drawn(count, 1e-2F, 100 * number + p);
      shared.give(begin, gradient);
      alone[p].give(0, gradient);
      run.begin = 0;
      run.end = count;
      const std::vector<DecayRun> own{run, {count, kTile, false}};
      alone[p].step(step, own, nullptr);
    }
    between(kSharedTiles * kTile, runs);
    const std::uint64_t sealed = hash(5);
    const UpdateHashes hashes = shared.step(step, runs, hashing);
    if (hashing == nullptr) return;
    EXPECT_EQ(hashes.before, sealed);
    EXPECT_EQ(hashes.after, hash(6));
  }
  void expect_same() const {
    for (std::size_t p = 0; p < kParts.size(); ++p) {
      const auto [begin, count, left_out] = kParts[p];
      for (std::size_t a = 0; a < state_arrays(shared.state).size(); ++a) {
        ASSERT_EQ(shared.array(a, begin, count), alone[p].array(a, 0, count))
            << state_arrays(shared.state)[a].name << " of parameter " << p;
      }
      for (std::size_t a = 0; a < state_names(kind_).size(); ++a) {
        std::vector<float> its(count);
        std::vector<float> wanted(count);
        read_state_values(shared.state, a, shared.bytes, begin, its);
        read_state_values(alone[p].state, a, alone[p].bytes, wanted);
        ASSERT_EQ(its, wanted) << state_names(kind_)[a] << " of parameter " << p;
      }
      for (std::size_t i = 0; i < count; ++i)
        ASSERT_EQ(shared.params.at(begin + i), alone[p].params.at(i)) << p << ", element " << i;
    }
  }
  std::uint64_t hash(std::uint64_t seed) const {
    return record_hash(shared.bytes, seed, record_format(shared.state));
  }

 private:
  static void between(std::size_t end, std::vector<DecayRun>& runs) {
    const std::size_t begin = runs.empty() ? 0 : runs.back().end;
    if (begin == end) return;
    runs.push_back({.begin = begin, .end = end, .decay = false, .skipped = true});
  }

  OptimizerKind kind_;
  Roundings rounding_;

 public:
  Record shared;
  std::vector<Record> alone;
};

TEST(SharedRecord, GivesEachParameterTheBitsThatItHasAlone) {
  const UpdateHashing verified{.verify = true, .seed_before = 5, .seed_after = 6};
  for (const OptimizerKind kind : kAllOptimizers) {
    for (const Roundings& rounding : roundings_of(k8Bit)) {
      SCOPED_TRACE(fmt::format("{}, {}", to_string(kind), text_of(rounding)));
      for_each_target([&] {
        Records records(kind, rounding);
        records.expect_same();
        for (std::uint64_t step = 1; step <= 3; ++step) {
          records.step(step, step == 1 ? nullptr : &verified);
          records.expect_same();
        }
      });
    }
  }
}

// A value of one is written where it is, and a whole array of another: nothing else changes.
TEST(SharedRecord, IsWrittenParameterByParameter) {
  for (const OptimizerKind kind : kAllOptimizers) {
    SCOPED_TRACE(to_string(kind));
    Records records(kind, {});
    records.step(1, nullptr);
    for (std::size_t p = 0; p < kParts.size(); p += 2) {
      const auto [begin, count, left_out] = kParts[p];
      for (std::size_t a = 0; a < state_names(kind).size(); ++a) {
        std::vector<float> values = drawn(count, 3, 7 * p + a);
        for (float& value : values) value = a == 2 ? value * value : value;
        Record& own = records.alone[p];
        write_state_values(own.state, a, values, own.bytes);
        write_state_values(records.shared.state, a, begin, values, records.shared.bytes);
      }
      records.expect_same();
    }
  }
}

TEST(SharedRecord, TakesAndGivesItsArraysAsTheyAre) {
  Records records(OptimizerKind::kAdamW, {});
  records.step(1, nullptr);
  Record copy(records.shared.state, kSharedTiles * kTile);
  for (const auto& [begin, count, left_out] : kParts) {
    for (std::size_t a = 0; a < state_arrays(copy.state).size(); ++a) {
      const std::vector<std::byte> values = records.shared.array(a, begin, count);
      write_state_array(copy.state, a, values, begin, copy.bytes);
    }
  }
  EXPECT_EQ(copy.bytes, records.shared.bytes);
}

TEST(SharedRecord, HasRoomForAScalePerSixteenElements) {
  const RecordFormat alone = record_format(OptimizerKind::kAdamW, k8Bit);
  const RecordFormat shared = record_format({OptimizerKind::kAdamW, k8Bit, true});
  EXPECT_EQ(alone.tile_bytes(), kTile * 6 + 2 * kTile / 256 * 4);
  EXPECT_EQ(shared.tile_bytes(), kTile * 6 + 2 * kTile / 16 * 4);
  EXPECT_NE(alone.text(), shared.text());
}

}  // namespace shared_record_test
}  // namespace ziggurat::testing
