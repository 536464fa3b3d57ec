// SPDX-License-Identifier: Apache-2.0
// tests/optimizer/cuda_update_test.cc: the kernels' update of a record against the specification,
// bit for bit: every optimizer, format, type and rounding, on values that kernels get wrong.
#include "optimizer/cuda/update.h"

#include "base/error.h"
#include "optimizer/record_slice.h"
#include "tests/optimizer/state.h"
#include "tests/support/cuda_memory.h"

namespace ziggurat::testing {
namespace {

using enum OptimizerKind;
using enum StateFormat;

/// A record, its gradient and its parameter, in bits drawn from a seed.
struct Case {
  OptimizerKind kind;
  StateFormat format;
  DType grad_dtype = DType::kBFloat16;
  DType param_dtype = DType::kBFloat16;
  Roundings rounding{};
  std::size_t count = kTileElements + 77;
  bool with_param = true;
  bool param_not_read = false;
  bool masters_from_param = false;
  bool with_grad = true;
  bool by_param = false;

  std::size_t tiles() const { return internal::tiles_of(count); }
};

std::ostream& operator<<(std::ostream& out, const Case& of) {
  return out << to_string(of.kind) << " in " << to_string(of.format) << ", gradient "
             << to_string(of.grad_dtype) << ", parameter " << to_string(of.param_dtype) << ", "
             << text_of(of.rounding) << (of.by_param ? ", by parameter" : "") << ", " << of.count
             << " elements" << (of.param_not_read ? ", parameter not read" : "")
             << (of.masters_from_param ? ", masters from it" : "")
             << (of.with_grad ? "" : ", no gradient");
}

/// Hard floats, as a type has them.
std::vector<std::byte> hard_values(DType dtype, std::size_t count, std::uint32_t seed) {
  HardFloats hard(seed);
  std::vector<std::byte> bytes(count * size_bytes(dtype));
  for (std::size_t i = 0; i < count; ++i) store_value(dtype, bytes.data(), i, hard.next());
  return bytes;
}

/// Every segment of hard floats of its type; codes are any bytes.
std::vector<std::byte> hard_record(const Case& of, std::uint32_t seed) {
  const RecordFormat format = record_format(of.kind, of.format);
  std::vector<std::byte> record(format.record_bytes(of.tiles()));
  HardFloats hard(seed);
  for (std::size_t index = 0; index < format.segments().size(); ++index) {
    const std::size_t tile_bytes = format.segments()[index].tile_bytes;
    std::byte* const to = record.data() + format.offset(index, of.tiles());
    const bool is_codes = of.format == k8Bit && index > 0 && tile_bytes == kTileElements;
    const DType dtype =
        tile_bytes == 2 * kTileElements ? DType::kBFloat16 : DType::kFloat32;  // residuals too
    for (std::size_t i = 0; i < of.tiles() * tile_bytes / (is_codes ? 1 : size_bytes(dtype)); ++i) {
      if (is_codes) {
        to[i] = static_cast<std::byte>(hard.word());
      } else {
        store_value(dtype, to, i, hard.next());
      }
    }
  }
  return record;
}

StepScalars two_groups(const Case& of) {
  OptimizerStep::Settings settings = usual_settings(of.kind);
  settings.rounding = of.rounding;
  settings.dampening = 0.25F;
  settings.nesterov = of.kind == kSgd;
  const OptimizerStep first = OptimizerStep::make(settings);
  settings.learning_rate = 2e-3F;
  settings.weight_decay = 0.02F;
  settings.nesterov = false;
  return {first, OptimizerStep::make(settings)};
}

/// Whole parameters and parts of them, of a beginning that is near the end of a key.
ParamPlace place_of(std::uint32_t number) {
  ParamPlace place{.name = 1000 + number, .first = ParamPlace::kOfKey - 100};
  if (number % 2 == 0) return place;
  place.block = 37;
  place.rank = 1;
  place.ranks = 3;
  return place;
}

/// Runs that begin and end inside tiles, inside blocks of codes and of threads, some of few
/// elements, one of none.
std::vector<DecayRun> odd_runs(std::size_t count, bool by_param) {
  std::vector<DecayRun> runs;
  std::size_t begin = 0;
  std::uint32_t number = 0;
  for (const std::size_t end : {std::size_t{3}, std::size_t{3}, std::size_t{260}, std::size_t{300},
                                std::size_t{1024}, std::size_t{5121}, count}) {
    runs.push_back({begin, end, number % 2 == 0, number % 3 == 1 ? 1u : 0u});
    if (by_param) runs.back().place = place_of(number);
    begin = end;
    ++number;
  }
  return runs;
}

constexpr std::uint64_t kFirstElement = 7 * kTileElements;

RecordView view_of(const Case& of, std::span<std::byte> record, std::span<std::byte> grad,
                   std::span<std::byte> param) {
  RecordView view{.format = of.format,
                  .record = record,
                  .param_not_read = of.param_not_read,
                  .masters_from_param = of.masters_from_param,
                  .first_element = kFirstElement};
  if (of.with_grad) view.grad = {of.grad_dtype, grad};
  if (of.with_param) view.param = {of.param_dtype, param};
  return view;
}

void expect_specification(const Case& of, std::uint32_t seed) {
  SCOPED_TRACE(::testing::PrintToString(of));
  std::vector<std::byte> record = hard_record(of, seed);
  std::vector<std::byte> grad = hard_values(of.grad_dtype, of.count, seed + 1);
  std::vector<std::byte> param = hard_values(of.param_dtype, of.count, seed + 2);
  const StepScalars steps = two_groups(of);
  const std::vector<DecayRun> runs = odd_runs(of.tiles() * kTileElements, of.by_param);

  OnDevice device_record(record, 4);
  OnDevice device_grad(grad, size_bytes(of.grad_dtype));
  OnDevice device_param(param, 3 * size_bytes(of.param_dtype));
  OnDevice scratch(std::vector<std::byte>(cuda::kUpdateScratchBytes), 0);
  draw_order(seed);
  cuda::update_record(nullptr, steps,
                      view_of(of, device_record.bytes(), device_grad.bytes(), device_param.bytes()),
                      runs, scratch.bytes());

  force_simd_target("scalar");
  update_record(steps, view_of(of, record, grad, param), runs);
  force_simd_target({});
  EXPECT_TRUE(same_bytes(device_record.read(), record)) << "of the record";
  EXPECT_TRUE(same_bytes(device_grad.read(), grad)) << "of the gradient";
  EXPECT_TRUE(same_bytes(device_param.read(), param)) << "of the parameter";
  EXPECT_EQ(scratch.read().size(), cuda::kUpdateScratchBytes);
}

std::vector<DType> param_types(StateFormat format) {
  if (holds_param(format)) return {DType::kBFloat16};
  return {kAllTypes.begin(), kAllTypes.end()};
}

class CudaUpdate : public ::testing::TestWithParam<StateFormat> {};

TEST_P(CudaUpdate, GivesTheSpecificationsBits) {
  std::uint32_t seed = 100;
  for (const OptimizerKind kind : kAllOptimizers) {
    for (const DType grad : kAllTypes) {
      for (const DType param : param_types(GetParam())) {
        for (const Roundings& rounding : roundings_of(GetParam())) {
          Case of{kind, GetParam(), grad, param, rounding};
          of.by_param = seed % 20 == 0;
          expect_specification(of, seed += 10);
          ASSERT_FALSE(::testing::Test::HasFailure());
        }
      }
    }
  }
}

/// Few elements, whole tiles, and one more.
TEST_P(CudaUpdate, AnyCount) {
  for (const std::size_t count : {std::size_t{1}, std::size_t{255}, kTileElements,
                                  kTileElements + 1, 2 * kTileElements - 1}) {
    Case of{kAdamW, GetParam()};
    of.count = count;
    expect_specification(of, static_cast<std::uint32_t>(count));
    of.kind = kLion;
    expect_specification(of, static_cast<std::uint32_t>(count) + 3);
  }
}

/// Where the record's first segment was not read, masters are taken anew, or no step is made.
TEST_P(CudaUpdate, ParametersOfTheTrainers) {
  for (const OptimizerKind kind : {kAdam, kSgd}) {
    Case of{kind, GetParam()};
    of.param_dtype = holds_param(GetParam()) ? DType::kBFloat16 : DType::kFloat32;
    of.param_not_read = true;
    expect_specification(of, 31);
    of.param_not_read = false;
    of.masters_from_param = true;
    for (const DType param : param_types(GetParam())) {
      of.param_dtype = param;
      of.with_grad = true;
      expect_specification(of, 32);
      of.with_grad = false;
      expect_specification(of, 33);
    }
    of.masters_from_param = false;
    expect_specification(of, 34);
    of.with_grad = true;
    of.with_param = false;
    if (holds_param(GetParam())) expect_specification(of, 35);
  }
}

INSTANTIATE_TEST_SUITE_P(EveryFormat, CudaUpdate, ::testing::ValuesIn(kAllFormats),
                         [](const auto& format) {
                           std::string name(to_string(format.param));
                           std::erase(name, '-');
                           return name;
                         });

TEST(CudaUpdateErrors, NamesTheArrayThatIsNotAligned) {
  const Case of{kAdamW, kFp32};
  OnDevice record(hard_record(of, 1), 2);
  OnDevice grad(hard_values(of.grad_dtype, of.count, 2), 0);
  OnDevice param(hard_values(of.param_dtype, of.count, 3), 0);
  const std::vector<std::byte> before = record.read();
  const DecayRun whole{0, of.tiles() * kTileElements, true};
  try {
    cuda::update_record(nullptr, two_groups(of),
                        view_of(of, record.bytes(), grad.bytes(), param.bytes()), {&whole, 1}, {});
    FAIL() << "nothing was refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("record begins at 0x"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("multiples of 4 bytes"));
  }
  EXPECT_TRUE(same_bytes(record.read(), before));
}

}  // namespace
}  // namespace ziggurat::testing
