// SPDX-License-Identifier: Apache-2.0
// tests/optimizer/cuda_compared_test.cc: the comparison of host twins with their kernels' PTX,
// which all other cases of this program rely on, sees a twin that is wrong.
#include <gmock/gmock.h>

#include <string>
#include <typeinfo>
#include <vector>

#include "optimizer/cuda/gradient.h"
#include "optimizer/cuda/gradient_programs.h"
#include "tests/cuda_double/cuda_double.h"
#include "tests/cuda_double/kernels.h"
#include "tests/cuda_double/optimizer_twins.h"
#include "tests/support/cuda_memory.h"

namespace ziggurat::testing {
namespace {

using cuda_double::TwinLaunch;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

/// What is found where `twin` takes the place of widening's.
std::vector<std::string> findings_with(const cuda_double::Twin& twin) {
  if (twin) cuda_double::add_program_twin(typeid(cuda::Widen), twin);
  OnDevice values(std::vector<std::uint16_t>(100, 0x3f80));
  OnDevice wide(std::vector<float>(100));
  cuda::widen(nullptr, {DType::kBFloat16, values.bytes()}, wide.as<float>());
  const std::vector<float> ones(100, 1.0F);
  EXPECT_TRUE(same_bytes(wide.read(), std::as_bytes(std::span(ones)))) << "the PTX's bytes stay";
  cuda_double::add_optimizer_twins();
  return cuda_double::take_findings();
}

TEST(CudaCompared, SeesAnotherByte) {
  EXPECT_THAT(findings_with({}), IsEmpty());
  const auto found = findings_with([](const TwinLaunch& launch) {
    const auto program = launch.parameter<cuda::Widen>(0);
    launch.reads(program.values, program.count * 2);
    const auto out = launch.writes(program.out, program.count);
    for (float& value : out) value = 1.0F;
    out[99] = 1.5F;
  });
  EXPECT_THAT(found, Not(IsEmpty()));
  EXPECT_THAT(found, Each(HasSubstr("leaves other bytes than its PTX")));
}

TEST(CudaCompared, SeesBytesThatTheTwinDoesNotTellOf) {
  const auto found = findings_with([](const TwinLaunch& launch) {
    const auto program = launch.parameter<cuda::Widen>(0);
    launch.reads(program.values, program.count * 2 - 2);
    for (float& value : launch.writes(program.out, program.count)) value = 1.0F;
  });
  EXPECT_THAT(found, Not(IsEmpty()));
  EXPECT_THAT(found, Each(HasSubstr("does not tell of 200 bytes that its PTX reads")));
}

}  // namespace
}  // namespace ziggurat::testing
