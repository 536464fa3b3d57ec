// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/c_interface_test.cc: libziggurat.so from outside: misuse is an error in
// words that changes nothing. What steps do is in c_step_test.cc, what is durable in
// c_durable_test.cc.
#include "tests/integrations/c/embedder.h"

namespace ziggurat::testing {
namespace c_interface_test {

class CInterface : public Embedder {};

// Programs that were compiled with a header of this version know the numbers, not the names, and
// Python reads the header, so that no other test would see one change.
TEST(CNumbers, AreThoseThatProgramsWereCompiledWith) {
  EXPECT_EQ(ZIGGURAT_ABI_VERSION, 0);
  EXPECT_EQ(ZIGGURAT_OK, 0);
  EXPECT_EQ(ZIGGURAT_INVALID_ARGUMENT, 1);
  EXPECT_EQ(ZIGGURAT_RESOURCE_EXHAUSTED, 2);
  EXPECT_EQ(ZIGGURAT_UNAVAILABLE, 3);
  EXPECT_EQ(ZIGGURAT_DEADLINE_EXCEEDED, 4);
  EXPECT_EQ(ZIGGURAT_DATA_LOSS, 5);
  EXPECT_EQ(ZIGGURAT_CANCELLED, 6);
  EXPECT_EQ(ZIGGURAT_UNIMPLEMENTED, 7);
  EXPECT_EQ(ZIGGURAT_INTERNAL, 8);
  EXPECT_EQ(ZIGGURAT_NOT_FINITE, 9);
  EXPECT_EQ(ZIGGURAT_FP32, 0);
  EXPECT_EQ(ZIGGURAT_BF16, 1);
  EXPECT_EQ(ZIGGURAT_FP16, 2);
  EXPECT_EQ(ZIGGURAT_FROZEN, 1U);
  EXPECT_EQ(ZIGGURAT_OPTIONAL, 2U);
  EXPECT_EQ(ZIGGURAT_STREAMED, 4U);
  EXPECT_EQ(ZIGGURAT_NESTEROV, 1);
  EXPECT_EQ(ZIGGURAT_MAXIMIZE, 2);
  EXPECT_EQ(ZIGGURAT_HOST_MEMORY, 0);
  EXPECT_EQ(ZIGGURAT_CUDA_MEMORY, 1);
}

TEST_F(CInterface, RefusesSettingsThatMakeNoRunByTheirName) {
  EXPECT_REFUSED(open("{"), "settings");
  EXPECT_REFUSED(
      open("{}"),
      "\"store\" is missing: give a directory, because optimizer state is not on the host");
  EXPECT_REFUSED(open(R"({"store": 7})"), "setting \"store\": 7");
  EXPECT_REFUSED(open(settings(R"(, "slotz": 1)")), "did you mean \"slots\"?");
  EXPECT_REFUSED(open(settings(R"(, "slots": "two")")), "slots");
  EXPECT_REFUSED(open(settings(R"(, "slots": 3)")), "setting \"slots\": 3");
  EXPECT_REFUSED(open(settings(R"(, "clip": 1.5)")), "clips them itself");
  EXPECT_REFUSED(ziggurat_runtime_create(R"({"threads": -1})", &runtime_), "threads");
  ASSERT_EQ(ziggurat_runtime_create(nullptr, &runtime_), ZIGGURAT_OK);
}

TEST_F(CInterface, RefusesParametersThatMakeNoModel) {
  const std::array<ziggurat_param, kParams> good = params_;
  params_[1].name = "first";
  EXPECT_REFUSED(open(settings()), "two parameters have the name 'first'");
  params_[1].name = nullptr;
  EXPECT_REFUSED(open(settings()), "param.name is null");
  params_ = good;
  params_[0].dimensions = 2;
  EXPECT_REFUSED(open(settings()), "'first' has 15 elements by its shape, but 105 in memory");
  params_ = good;
  params_[0].values.dtype = 9;
  EXPECT_REFUSED(open(settings()), "param.values.dtype is 9");
  params_ = good;
  params_[0].values.address = nullptr;
  EXPECT_REFUSED(open(settings()),
                 "\"device_memory\" is missing: parameter 'first' has no address");
  params_[0].unit = 2;
  EXPECT_REFUSED(open(settings(R"(, "device_memory": "1MiB")")),
                 "number units from 0, without gaps");
  params_[0].values.dtype = 9;
  EXPECT_REFUSED(open(settings()), "param.values.dtype is 9");
  params_ = good;
  EXPECT_REFUSED(open(settings(R"(, "device_memory": "1MiB")")), "leave it out");
  params_[0].unit = 1;
  EXPECT_REFUSED(open(settings()), "'first' has a unit, but is in the caller's memory");
  params_ = good;
  params_[0].values.address = values_[0].bytes.data() + 2;
  EXPECT_REFUSED(open(settings()), "not aligned");
  params_ = good;
  params_[0].struct_size = 1;
  EXPECT_REFUSED(open(settings()), "struct_size");
  params_ = good;
  EXPECT_REFUSED(ziggurat_engine_open(runtime_, nullptr, 0, settings().c_str(), &engine_),
                 "the model has no parameters");
  EXPECT_REFUSED(ziggurat_engine_open(runtime_, nullptr, 2, settings().c_str(), &engine_),
                 "params is null");
}

// The record holds the parameter in bf16: whichever comes first, one of them does not fit.
TEST_F(CInterface, RefusesAnFp32ParameterInAFormatThatHoldsItInBf16) {
  for (const char* format : {"split", "bf16"}) {
    for (const std::size_t other : {0U, 1U}) {
      set_values(other, initial(other, DType::kBFloat16));
      set_values(1 - other, initial(1 - other, DType::kFloat32));
      EXPECT_REFUSED(open(settings(R"(, "state_format": ")" + std::string(format) + "\"")), "bf16");
    }
  }
}

TEST_F(CInterface, RefusesAStoreWhoseParametersHadOtherTypes) {
  ASSERT_DONE(open(settings()));
  lend_both(1);
  ASSERT_DONE(step());
  ASSERT_DONE(ziggurat_make_durable(engine_));
  close();
  set_values(1, initial(1, DType::kBFloat16));
  EXPECT_NE(open(settings()), ZIGGURAT_OK);
  EXPECT_STRNE(ziggurat_last_error(), "");
}

TEST_F(CInterface, RefusesCallsThatMakeNoSenseAndGoesOn) {
  ASSERT_DONE(open(settings()));
  TypedArray few(DType::kFloat32, 3);
  const ziggurat_memory memory = memory_of(few);
  EXPECT_REFUSED(lend(2, gradient_of(0, 1)), "lend_gradient(parameter 2): the model has 2");
  EXPECT_REFUSED(lend(0, few), "3 elements were given, but the parameter has 105");
  EXPECT_REFUSED(add(0, few), "3 elements were given, but the parameter has 105");
  EXPECT_REFUSED(ziggurat_lend_gradient(engine_, 0, nullptr, 1), "gradient is null");
  EXPECT_REFUSED(ziggurat_lend_param(engine_, 0, &memory),
                 "3 elements were given, but the parameter has 105");
  TypedArray narrow = initial(0, DType::kBFloat16);
  const ziggurat_memory of_another_type = memory_of(narrow);
  EXPECT_REFUSED(ziggurat_lend_param(engine_, 0, &of_another_type),
                 "the parameter is fp32, but the memory is bf16");
  EXPECT_REFUSED(ziggurat_param_written(engine_, 2), "the model has 2");
  EXPECT_REFUSED(ziggurat_wait(engine_, 2), "the model has 2");
  std::uint64_t steps = 0;
  EXPECT_REFUSED(ziggurat_param_steps(engine_, 2, &steps), "the model has 2");
  EXPECT_REFUSED(ziggurat_param_steps(engine_, 0, nullptr), "steps is null");
  EXPECT_REFUSED(ziggurat_gradient_norm(engine_, nullptr), "norm is null");
  EXPECT_REFUSED(ziggurat_step(engine_, nullptr, &result_), "options is null");
  EXPECT_REFUSED(ziggurat_give_blob(engine_, nullptr, 4), "blob is null");

  lend_both(1);
  ziggurat_step_options one_group = options();
  one_group.group_count = 1;
  EXPECT_REFUSED(step(one_group), "1 groups were given, but the parameters use 2");
  ziggurat_step_options flagged = options();
  flagged.flags = 4 | ZIGGURAT_UPDATE_AT_ONCE;
  EXPECT_REFUSED(step(flagged), "options.flags is 0x6");
  const TypedArray before = values_[0];
  EXPECT_EQ(updated(0), before);
  ASSERT_DONE(step());
  EXPECT_NE(updated(0), before);
}

TEST_F(CInterface, KnowsNoHandleThatIsGone) {
  ASSERT_DONE(open(settings()));
  EXPECT_REFUSED(ziggurat_runtime_destroy(runtime_), "close them first");
  const ziggurat_engine gone = engine_;
  close();
  EXPECT_REFUSED(ziggurat_make_durable(gone), "there is no engine");
  EXPECT_REFUSED(ziggurat_engine_close(gone), "there is no engine");
  EXPECT_REFUSED(ziggurat_make_durable(0), "there is no engine 0");
  EXPECT_REFUSED(ziggurat_runtime_destroy(77), "there is no runtime 77");
}

}  // namespace c_interface_test
}  // namespace ziggurat::testing
