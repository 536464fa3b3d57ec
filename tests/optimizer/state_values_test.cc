// SPDX-License-Identifier: Apache-2.0
// tests/optimizer/state_values_test.cc: the arrays of a record by name: written ones are rounded as
// the kernels round, read ones are what is there, and the others stay.
#include "optimizer/state_values.h"

#include <gtest/gtest.h>

#include <cstring>

#include "base/numerics/rounding.h"
#include "optimizer/kernels.h"
#include "tests/optimizer/state.h"
#include "tests/support/hard_floats.h"

namespace ziggurat::testing {
namespace state_values_test {

constexpr std::size_t kCount = kTileElements + 300;  // two tiles, most of the second is padding
constexpr std::size_t kPadded = 2 * kTileElements;

std::vector<std::byte> empty_record(const StateKind& state) {
  return std::vector<std::byte>(record_format(state).record_bytes(2));
}

std::vector<float> floats(std::uint32_t seed) {
  HardFloats hard(seed);
  std::vector<float> values(kCount);
  for (float& value : values) value = hard.next();
  return values;
}

std::vector<float> read(const StateKind& state, std::size_t index,
                        const std::vector<std::byte>& record, std::size_t count = kCount) {
  std::vector<float> values(count);
  read_state_values(state, index, record, values);
  return values;
}

/// What array `index` holds of `values`.
std::vector<float> rounded(const StateKind& state, std::size_t index, std::vector<float> values) {
  for (float& value : values) value = quiet(value);
  const bool is_sum = state.optimizer == OptimizerKind::kAdagrad && index == 1;
  values.resize(kPadded, is_sum ? values.back() : 0.0F);
  const bool is_master = index == 0;
  const bool in_bf16 = state.format == StateFormat::kBf16 ||
                       (state.format == StateFormat::kBf16Moments && !is_master);
  if (in_bf16) {
    for (float& value : values) value = bf16_to_float(float_to_bf16(value));
  }
  if (state.format == StateFormat::k8Bit && !is_master) {
    const EightBitCode code = internal::moment_code(state.optimizer, index - 1);
    std::vector<std::uint8_t> codes(kPadded);
    std::vector<float> scales(kPadded / kEightBitBlock);
    encode_eight_bit(code, values.data(), codes, scales.data());
    decode_eight_bit(code, codes, scales.data(), values.data());
  }
  values.resize(kCount);
  return values;
}

void expect_same_bits(const std::vector<float>& one, const std::vector<float>& other,
                      const std::string& what) {
  EXPECT_EQ(std::memcmp(one.data(), other.data(), one.size() * sizeof(float)), 0) << what;
}

TEST(StateValues, HaveTorchsNamesInTheRecordsOrder) {
  for (const OptimizerKind kind : kAllOptimizers) {
    const std::vector<std::string> names = state_names(kind);
    EXPECT_EQ(names.size(), 1 + moment_count(kind));
    EXPECT_EQ(find_state(kind, "master"), 0U);
    EXPECT_EQ(find_state(kind, "max_exp_avg_sq"), std::nullopt);
    const RecordFormat format = record_format(kind, StateFormat::kFp32);
    for (std::size_t i = 0; i < names.size(); ++i) {
      EXPECT_EQ(find_state(kind, names[i]), i);
      EXPECT_EQ(format.segments()[i].name, names[i] + " fp32");
    }
  }
}

TEST(StateValues, AreReadAsTheyWereWrittenInEveryFormat) {
  for (const OptimizerKind kind : kAllOptimizers) {
    for (const StateFormat format : kAllFormats) {
      const StateKind state{kind, format};
      std::vector<std::byte> record = empty_record(state);
      std::vector<std::vector<float>> expected;
      for (std::size_t i = 0; i < state_names(kind).size(); ++i) {
        const std::vector<float> values = floats(static_cast<std::uint32_t>(i + 1));
        write_state_values(state, i, values, record);
        expected.push_back(rounded(state, i, values));
      }
      for (std::size_t i = 0; i < expected.size(); ++i) {
        expect_same_bits(read(state, i, record), expected[i],
                         to_string(state) + " " + state_names(kind)[i]);
      }
    }
  }
}

TEST(StateValues, OfWholeBitsKeepThemWhenWrittenBack) {
  for (const OptimizerKind kind : kAllOptimizers) {
    for (const StateFormat format : kKernelFormats) {
      const StateKind state{kind, format};
      std::vector<std::byte> record = empty_record(state);
      std::vector<std::byte> copy = empty_record(state);
      for (std::size_t i = 0; i < state_names(kind).size(); ++i) {
        write_state_values(state, i, floats(static_cast<std::uint32_t>(i + 5)), record);
        write_state_values(state, i, read(state, i, record), copy);
      }
      EXPECT_EQ(record, copy) << to_string(state);
    }
  }
}

TEST(StateValues, OfSomeElementsAreWrittenAndReadAlone) {
  constexpr std::uint64_t kFirst = 3 * kEightBitBlock;
  constexpr std::size_t kOwn = 2 * kEightBitBlock;
  for (const OptimizerKind kind : kAllOptimizers) {
    for (const StateFormat format : kAllFormats) {
      const StateKind state{kind, format};
      std::vector<std::byte> record = empty_record(state);
      for (std::size_t i = 0; i < state_names(kind).size(); ++i) {
        SCOPED_TRACE(to_string(state) + " " + state_names(kind)[i]);
        const std::vector<float> before = floats(static_cast<std::uint32_t>(i + 1));
        write_state_values(state, i, before, record);
        std::vector<float> wanted = read(state, i, record);
        std::vector<float> its = floats(static_cast<std::uint32_t>(i + 9));
        its.resize(kOwn);
        write_state_values(state, i, kFirst, its, record);
        std::vector<float> own(kOwn);
        read_state_values(state, i, record, kFirst, own);
        expect_same_bits(own, rounded(state, i, its), "what was written");
        std::copy(own.begin(), own.end(), wanted.begin() + kFirst);
        expect_same_bits(read(state, i, record), wanted, "the others");
      }
    }
  }
}

TEST(StateValues, HaveThePaddingThatARecordBeginsWith) {
  for (const OptimizerKind kind : kAllOptimizers) {
    for (const StateFormat format : kAllFormats) {
      const StateKind state{kind, format};
      const bool has_sum = kind == OptimizerKind::kAdagrad;
      std::vector<float> masters(kPadded, 0.5F);
      std::fill(masters.begin() + kCount, masters.end(), 0.0F);
      std::vector<std::byte> fresh = empty_record(state);
      write_record(kind, format, masters, fresh, has_sum ? 0.25F : 0.0F);
      std::vector<std::byte> record(fresh.size(), std::byte{0x5a});
      // What lies behind all segments is the store's, and stays.
      const std::uint64_t used = 2 * record_format(state).tile_bytes();
      std::copy(fresh.begin() + static_cast<std::ptrdiff_t>(used), fresh.end(),
                record.begin() + static_cast<std::ptrdiff_t>(used));
      write_state_values(state, 0, std::vector<float>(kCount, 0.5F), record);
      for (std::size_t i = 1; i < state_names(kind).size(); ++i)
        write_state_values(state, i, std::vector<float>(kCount, has_sum ? 0.25F : 0.0F), record);
      EXPECT_TRUE(record == fresh) << to_string(state);
    }
  }
}

}  // namespace state_values_test
}  // namespace ziggurat::testing
