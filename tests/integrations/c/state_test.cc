// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/state_test.cc: a parameter's state by name and its count of steps through
// libziggurat.so: what is read and written, when it is durable, and what is refused. Every
// optimizer and format is compared in tests/core/lent_state_test.cc.
#include <cstring>

#include "tests/integrations/c/embedder.h"

namespace ziggurat::testing {
namespace state_test {

class CState : public Embedder {
 protected:
  std::vector<float> read(std::size_t param, const char* name) const {
    std::vector<float> values(kCounts[param]);
    const ziggurat_memory memory = floats_of(values);
    EXPECT_EQ(ziggurat_read_state(engine_, param, name, &memory), ZIGGURAT_OK)
        << ziggurat_last_error();
    return values;
  }
  void write(std::size_t param, const char* name, std::vector<float> values) const {
    const ziggurat_memory memory = floats_of(values);
    EXPECT_EQ(ziggurat_write_state(engine_, param, name, &memory), ZIGGURAT_OK)
        << ziggurat_last_error();
  }
  void set_steps(std::size_t param, std::uint64_t steps) const {
    EXPECT_EQ(ziggurat_set_param_steps(engine_, param, steps), ZIGGURAT_OK);
  }
  static ziggurat_memory floats_of(std::vector<float>& values) {
    ziggurat_memory its = ZIGGURAT_INIT(ziggurat_memory);
    its.address = values.data();
    its.size_bytes = values.size() * sizeof(float);
    return its;
  }
  static std::vector<float> numbers(std::size_t param) {
    std::vector<float> values(kCounts[param]);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 251) / 64.0F;
    return values;
  }
};

TEST_F(CState, IsReadAndWrittenByNameBesideItsCountOfSteps) {
  ASSERT_DONE(open(settings()));
  std::vector<PlainParam> plain{PlainParam(values_[0]), PlainParam(values_[1])};
  lend_both(1);
  ASSERT_DONE(step());
  for (std::size_t p = 0; p < kParams; ++p) plain[p].step(scalars(p, 1), gradient_of(p, 1));
  EXPECT_EQ(read(1, "exp_avg"), plain[1].state("exp_avg"));
  write(1, "exp_avg_sq", numbers(1));
  plain[1].write_state("exp_avg_sq", numbers(1));
  EXPECT_EQ(read(1, "exp_avg_sq"), numbers(1));
  set_steps(1, 7);
  lend_both(2);
  ASSERT_DONE(step());
  plain[0].step(scalars(0, 2), gradient_of(0, 2));
  plain[1].step(scalars(1, 8), gradient_of(1, 2));
  for (std::size_t p = 0; p < kParams; ++p) EXPECT_EQ(updated(p), plain[p].values()) << p;
  EXPECT_EQ(steps_of(1), 8U);
}

TEST_F(CState, ThatIsWrittenBecomesDurableWithTheNextStepAndNotBefore) {
  for (const char* const more : {"", R"(, "slots": 1)", kOnHost}) {
    ASSERT_DONE(open(settings(std::string(more) + R"(, "resume": "never")")));
    lend_both(1);
    ASSERT_DONE(step());
    const std::vector<float> before = read(1, "exp_avg");
    write(1, "exp_avg", numbers(1));
    set_steps(1, 9);
    EXPECT_EQ(steps_of(1), 9U);
    ASSERT_DONE(ziggurat_make_durable(engine_));
    reopen(settings(more));
    EXPECT_EQ(read(1, "exp_avg"), before) << more;
    EXPECT_EQ(steps_of(1), 1U);
    write(1, "exp_avg", numbers(1));
    set_steps(1, 9);
    ASSERT_DONE(lend(0, gradient_of(0, 2)));
    ASSERT_DONE(step());
    ASSERT_DONE(ziggurat_make_durable(engine_));
    reopen(settings(more));
    EXPECT_EQ(read(1, "exp_avg"), numbers(1)) << more;
    EXPECT_EQ(steps_of(1), 9U);
    close();
  }
}

TEST_F(CState, TheStepsOfAStepWhoseBlobComesLaterAreItsOwn) {
  ASSERT_DONE(open(settings()));
  PlainParam plain(values_[0]);
  lend_both(1);
  ziggurat_step_options later = options();
  later.flags = ZIGGURAT_BLOB_FOLLOWS;
  ASSERT_DONE(step(later));
  plain.step(scalars(0, 1), gradient_of(0, 1));
  EXPECT_EQ(read(0, "exp_avg"), plain.state("exp_avg"));  // it is not durable yet
  set_steps(0, 50);
  ASSERT_DONE(ziggurat_give_blob(engine_, "late", 4));
  ASSERT_DONE(ziggurat_make_durable(engine_));
  reopen(settings());
  EXPECT_EQ(steps_of(0), 1U);
}

TEST_F(CState, TheLaterOfAWrittenParameterAndAWrittenMasterCounts) {
  for (const bool param_is_later : {false, true}) {
    set_values(1, initial(1, DType::kFloat32));
    ASSERT_DONE(open(settings(R"(, "resume": "never")")));
    if (param_is_later) write(1, "master", numbers(1));
    ASSERT_DONE(ziggurat_param_written(engine_, 1));
    if (!param_is_later) write(1, "master", numbers(1));
    const TypedArray own = values_[1];
    ASSERT_DONE(lend(0, gradient_of(0, 1)));
    ASSERT_DONE(step());
    const TypedArray written(DType::kFloat32, numbers(1));
    EXPECT_EQ(updated(1), param_is_later ? own : written);
    close();
  }
}

TEST_F(CState, RefusesWhatAParameterDoesNotHave) {
  ASSERT_DONE(open(settings()));
  std::array<char, 64> text{};
  std::uint64_t needed = 0;
  ASSERT_DONE(ziggurat_state_names(engine_, text.data(), text.size(), &needed));
  EXPECT_STREQ(text.data(), "master\nexp_avg\nexp_avg_sq\n");
  EXPECT_EQ(needed, std::strlen(text.data()) + 1);

  std::vector<float> values(kCounts[1]);
  ziggurat_memory memory = floats_of(values);
  EXPECT_REFUSED(
      ziggurat_read_state(engine_, 1, "sum", &memory),
      "read_state('second', 'sum'): there is no such array: the state of adamw consists of "
      "master, exp_avg, exp_avg_sq");
  EXPECT_REFUSED(ziggurat_write_state(engine_, 1, "step", &memory), "write_state('second'");
  EXPECT_REFUSED(ziggurat_read_state(engine_, 0, "master", &memory), "40000 elements");
  EXPECT_REFUSED(ziggurat_read_state(engine_, 2, "master", &memory), "parameter 2");
  EXPECT_REFUSED(ziggurat_read_state(engine_, 1, nullptr, &memory), "name is null");
  EXPECT_REFUSED(ziggurat_read_state(engine_, 1, "master", nullptr), "values is null");
  EXPECT_REFUSED(ziggurat_set_param_steps(engine_, 2, 1), "parameter 2");
  memory.dtype = ZIGGURAT_BF16;
  EXPECT_REFUSED(ziggurat_write_state(engine_, 1, "master", &memory), "values is in bf16");
}

}  // namespace state_test
}  // namespace ziggurat::testing
