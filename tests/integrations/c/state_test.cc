// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/state_test.cc: a parameter's state by name through libziggurat.so: what is
// read is that of plain arrays, and training goes on from what is written, on every tier.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/numerics/typed_value.h"
#include "integrations/c/ziggurat.h"
#include "optimizer/state_values.h"
#include "optimizer/update.h"
#include "tests/integrations/c/embedder.h"
#include "tests/support/scratch_directory.h"
#include "tiers/store/record_hash.h"

namespace state_test {

using ::testing::HasSubstr;
using ziggurat::DType;
using ziggurat::kTileElements;
using ziggurat::OptimizerKind;
using ziggurat::StateFormat;
using ziggurat::StateKind;

constexpr std::array<std::int64_t, 2> kCounts{kTileElements + 3000, 105};

DType dtype_of(StateFormat format) {
  return ziggurat::holds_param(format) ? DType::kBFloat16 : DType::kFloat32;
}

std::vector<float> numbers(std::size_t count, unsigned seed) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i)
    values[i] = static_cast<float>((i * 37 + std::size_t{seed} * 101) % 251) / 64.0F - 2.0F;
  return values;
}

/// Elements in memory that a trainer lends.
struct Lent {
  DType dtype;
  std::vector<std::byte> bytes;

  Lent(DType type, const std::vector<float>& values)
      : dtype(type), bytes(values.size() * size_bytes(type)) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (type == DType::kFloat32) {
        std::memcpy(bytes.data() + 4 * i, &values[i], 4);
      } else {
        const ziggurat::bf16 half = ziggurat::float_to_bf16(values[i]);
        std::memcpy(bytes.data() + 2 * i, &half, 2);
      }
    }
  }
  ziggurat_memory memory() {
    ziggurat_memory its = ZIGGURAT_INIT(ziggurat_memory);
    its.dtype = dtype == DType::kFloat32 ? ZIGGURAT_FP32 : ZIGGURAT_BF16;
    its.address = bytes.data();
    its.size_bytes = bytes.size();
    return its;
  }
};

ziggurat_memory memory_of(std::vector<float>& values) {
  ziggurat_memory its = ZIGGURAT_INIT(ziggurat_memory);
  its.address = values.data();
  its.size_bytes = values.size() * sizeof(float);
  return its;
}

ziggurat_group group_of(OptimizerKind kind) {
  ziggurat_group group = ZIGGURAT_INIT(ziggurat_group);
  group.learning_rate = 0.01F;
  group.beta1 = 0.9F;
  group.beta2 = 0.99F;
  group.eps = 1e-8F;
  group.weight_decay = kind == OptimizerKind::kSgd ? 0.0F : 0.1F;
  return group;
}

/// A record and its parameter in plain memory, and the update's own kernel.
class Plain {
 public:
  Plain(StateKind state, const std::vector<float>& values)
      : state_(state),
        count_(values.size()),
        tiles_((count_ + kTileElements - 1) / kTileElements),
        record_(record_format(state).record_bytes(tiles_)),
        param_(dtype_of(state.format), padded(values)) {
    std::vector<float> masters(tiles_ * kTileElements);
    for (std::size_t i = 0; i < count_; ++i)
      masters[i] = ziggurat::value_at(param_.dtype, param_.bytes.data(), i);
    write_record(state.optimizer, state.format, masters, record_);
  }
  void step(const std::vector<float>& gradient, std::uint64_t t) {
    const ziggurat_group group = group_of(state_.optimizer);
    const std::vector<float> grad = padded(gradient);
    const std::array<ziggurat::DecayRun, 1> runs{{{0, grad.size(), true}}};
    ziggurat::update_record(ziggurat::OptimizerStep::make({.kind = state_.optimizer,
                                                           .learning_rate = group.learning_rate,
                                                           .beta1 = group.beta1,
                                                           .beta2 = group.beta2,
                                                           .eps = group.eps,
                                                           .weight_decay = group.weight_decay,
                                                           .grad_scale = 1.0F,
                                                           .t = t}),
                            {.format = state_.format,
                             .record = record_,
                             .grad = ziggurat::as_typed(std::span<const float>(grad)),
                             .param = {param_.dtype, param_.bytes}},
                            runs);
  }
  std::vector<float> read(const std::string& name) const {
    std::vector<float> values(count_);
    read_state_values(state_, *find_state(state_.optimizer, name), record_, values);
    return values;
  }
  void write(const std::string& name, const std::vector<float>& values) {
    write_state_values(state_, *find_state(state_.optimizer, name), values, record_);
  }
  std::vector<std::byte> param() const {
    return {param_.bytes.begin(),
            param_.bytes.begin() + static_cast<std::ptrdiff_t>(count_ * size_bytes(param_.dtype))};
  }

 private:
  std::vector<float> padded(std::vector<float> values) const {
    values.resize(tiles_ * kTileElements);
    return values;
  }

  StateKind state_;
  std::size_t count_;
  std::size_t tiles_;
  std::vector<std::byte> record_;
  Lent param_;
};

/// An engine of two parameters in one group.
class Opened {
 public:
  Opened(const std::string& settings, DType dtype) {
    EXPECT_EQ(ziggurat_runtime_create(R"({"threads": 2})", &runtime_), ZIGGURAT_OK);
    for (unsigned p = 0; p < 2; ++p)
      lent_.emplace_back(dtype, numbers(static_cast<std::size_t>(kCounts[p]), p));
    std::array<ziggurat_param, 2> params{};
    for (std::size_t p = 0; p < 2; ++p) {
      params[p] = ZIGGURAT_INIT(ziggurat_param);
      params[p].name = p == 0 ? "first" : "second";
      params[p].shape = &kCounts[p];
      params[p].dimensions = 1;
      params[p].values = lent_[p].memory();
    }
    EXPECT_EQ(
        ziggurat_engine_open(runtime_, params.data(), params.size(), settings.c_str(), &engine),
        ZIGGURAT_OK)
        << ziggurat_last_error();
  }
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;
  ~Opened() {
    EXPECT_EQ(ziggurat_engine_close(engine), ZIGGURAT_OK);
    EXPECT_EQ(ziggurat_runtime_destroy(runtime_), ZIGGURAT_OK);
  }

  /// `gradients`: of each parameter; none where it is empty.
  ziggurat_status begin_step(const ziggurat_group& group,
                             const std::array<std::vector<float>, 2>& gradients,
                             std::uint32_t flags = 0) {
    gradients_ = gradients;
    for (std::uint64_t p = 0; p < 2; ++p) {
      if (gradients_[p].empty()) continue;
      const ziggurat_memory memory = memory_of(gradients_[p]);
      EXPECT_EQ(ziggurat_lend_gradient(engine, p, &memory, 1), ZIGGURAT_OK);
    }
    ziggurat_step_options options = ZIGGURAT_INIT(ziggurat_step_options);
    options.groups = &group;
    options.group_count = 1;
    options.flags = flags;
    ziggurat_step_result result = ZIGGURAT_INIT(ziggurat_step_result);
    return ziggurat_step(engine, &options, &result);
  }
  void step(const ziggurat_group& group, const std::array<std::vector<float>, 2>& gradients) {
    ASSERT_EQ(begin_step(group, gradients), ZIGGURAT_OK) << ziggurat_last_error();
  }
  std::vector<float> read(std::uint64_t param, const std::string& name) const {
    std::vector<float> values(static_cast<std::size_t>(kCounts[param]));
    const ziggurat_memory memory = memory_of(values);
    EXPECT_EQ(ziggurat_read_state(engine, param, name.c_str(), &memory), ZIGGURAT_OK)
        << ziggurat_last_error();
    return values;
  }
  void write(std::uint64_t param, const std::string& name, std::vector<float> values) const {
    const ziggurat_memory memory = memory_of(values);
    EXPECT_EQ(ziggurat_write_state(engine, param, name.c_str(), &memory), ZIGGURAT_OK)
        << ziggurat_last_error();
  }
  std::vector<std::byte> param(std::uint64_t param) const {
    EXPECT_EQ(ziggurat_wait(engine, param), ZIGGURAT_OK);
    return lent_[param].bytes;
  }
  void make_durable() const { EXPECT_EQ(ziggurat_make_durable(engine), ZIGGURAT_OK); }
  std::uint64_t steps(std::uint64_t param) const {
    std::uint64_t its = 0;
    EXPECT_EQ(ziggurat_param_steps(engine, param, &its), ZIGGURAT_OK);
    return its;
  }

  ziggurat_engine engine = 0;

 private:
  ziggurat_runtime runtime_ = 0;
  std::vector<Lent> lent_;
  std::array<std::vector<float>, 2> gradients_;
};

std::array<std::vector<float>, 2> gradients_of(unsigned step) {
  return {numbers(kCounts[0], 10 + 2 * step), numbers(kCounts[1], 11 + 2 * step)};
}

class CState : public ::testing::Test {
 protected:
  std::string settings(StateKind state, const std::string& more = "") const {
    return R"({"store": ")" + directory_.path() + R"(/store", "optimizer": ")" +
           std::string(to_string(state.optimizer)) + R"(", "state_format": ")" +
           std::string(to_string(state.format)) + "\"" + more + "}";
  }
  const ziggurat::testing::ScratchDirectory directory_;
};

constexpr StateKind kUsual{OptimizerKind::kAdamW, StateFormat::kFp32};
// Plain arrays round to nearest.
const char* const kNvme = R"(, "resume": "never", "state_rounding": "nearest")";
const char* const kHost =
    R"(, "resume": "never", "state_rounding": "nearest", "placement": "optimizer=host")";

TEST_F(CState, IsThatOfPlainArraysAndGoesOnFromWhatIsWritten) {
  for (const std::string_view optimizer : ziggurat::optimizer_names()) {
    for (const std::string_view format : ziggurat::state_format_names()) {
      const StateKind state{*ziggurat::parse_optimizer(optimizer),
                            *ziggurat::parse_state_format(format)};
      const ziggurat_group group = group_of(state.optimizer);
      for (const char* const more : {kNvme, kHost}) {
        SCOPED_TRACE(to_string(state) + more);
        Opened opened(settings(state, more), dtype_of(state.format));
        std::vector<Plain> plain;
        for (unsigned p = 0; p < 2; ++p)
          plain.emplace_back(state, numbers(static_cast<std::size_t>(kCounts[p]), p));
        for (unsigned t = 1; t <= 5; ++t) {
          opened.step(group, gradients_of(t));
          for (unsigned p = 0; p < 2; ++p) plain[p].step(gradients_of(t)[p], t == 5 ? 8 : t);
          for (const std::string& name : ziggurat::state_names(state.optimizer)) {
            for (unsigned p = 0; p < 2; ++p) ASSERT_EQ(opened.read(p, name), plain[p].read(name));
            if (t != 4) continue;
            std::vector<float> values = numbers(static_cast<std::size_t>(kCounts[0]), 77);
            for (float& value : values) value = value * value;  // sums of squares have no sign
            for (unsigned p = 0; p < 2; ++p) {
              values.resize(static_cast<std::size_t>(kCounts[p]));
              opened.write(p, name, values);
              plain[p].write(name, values);
              ASSERT_EQ(opened.read(p, name), plain[p].read(name)) << name;
              ASSERT_EQ(ziggurat_set_param_steps(opened.engine, p, 7), ZIGGURAT_OK);
            }
          }
        }
        for (unsigned p = 0; p < 2; ++p) {
          EXPECT_EQ(opened.param(p), plain[p].param());
          EXPECT_EQ(opened.steps(p), 8U);
        }
      }
    }
  }
}

TEST_F(CState, IsReadFromKeptRecordsAndFromTheDriveAlike) {
  for (const char* const memory : {R"(, "host_memory": "512MiB")", R"(, "host_memory": "6MiB")"}) {
    Opened opened(settings(kUsual, std::string(kNvme) + memory), DType::kFloat32);
    Plain plain(kUsual, numbers(static_cast<std::size_t>(kCounts[0]), 0));
    for (unsigned t = 1; t <= 3; ++t) {
      opened.step(group_of(kUsual.optimizer), gradients_of(t));
      plain.step(gradients_of(t)[0], t);
      EXPECT_EQ(opened.read(0, "exp_avg_sq"), plain.read("exp_avg_sq"));
      opened.write(0, "exp_avg", plain.read("exp_avg_sq"));
      plain.write("exp_avg", plain.read("exp_avg_sq"));
    }
    EXPECT_EQ(opened.read(0, "master"), plain.read("master"));
  }
}

TEST_F(CState, ThatIsWrittenBecomesDurableWithTheNextStepAndNotBefore) {
  for (const char* const more : {"", R"(, "slots": 1)", R"(, "placement": "optimizer=host")"}) {
    const std::string where = settings(kUsual, more);
    std::vector<float> before;
    const std::vector<float> written = numbers(static_cast<std::size_t>(kCounts[1]), 5);
    {
      const std::string anew = settings(kUsual, std::string(more) + R"(, "resume": "never")");
      Opened opened(anew, DType::kFloat32);
      opened.step(group_of(kUsual.optimizer), gradients_of(1));
      before = opened.read(1, "exp_avg");
      opened.write(1, "exp_avg", written);
      EXPECT_EQ(ziggurat_set_param_steps(opened.engine, 1, 9), ZIGGURAT_OK);
      EXPECT_EQ(opened.steps(1), 9U);
      opened.make_durable();
    }
    {
      Opened opened(where, DType::kFloat32);
      EXPECT_EQ(opened.read(1, "exp_avg"), before) << more;
      EXPECT_EQ(opened.steps(1), 1U);
      opened.write(1, "exp_avg", written);
      EXPECT_EQ(ziggurat_set_param_steps(opened.engine, 1, 9), ZIGGURAT_OK);
      opened.step(group_of(kUsual.optimizer), {gradients_of(2)[0], {}});
      opened.make_durable();
    }
    Opened opened(where, DType::kFloat32);
    EXPECT_EQ(opened.read(1, "exp_avg"), written) << more;
    EXPECT_EQ(opened.steps(1), 9U);
  }
}

TEST_F(CState, TheStepsOfAStepWhoseBlobComesLaterAreItsOwn) {
  const char* const blob = "late";
  {
    Opened opened(settings(kUsual, kNvme), DType::kFloat32);
    ASSERT_EQ(opened.begin_step(group_of(kUsual.optimizer), gradients_of(1), ZIGGURAT_BLOB_FOLLOWS),
              ZIGGURAT_OK);
    Plain plain(kUsual, numbers(static_cast<std::size_t>(kCounts[0]), 0));
    plain.step(gradients_of(1)[0], 1);
    EXPECT_EQ(opened.read(0, "exp_avg"), plain.read("exp_avg"));  // it is not durable yet
    EXPECT_EQ(ziggurat_set_param_steps(opened.engine, 0, 50), ZIGGURAT_OK);
    EXPECT_EQ(ziggurat_give_blob(opened.engine, blob, 4), ZIGGURAT_OK);
    opened.make_durable();
  }
  Opened opened(settings(kUsual), DType::kFloat32);
  EXPECT_EQ(opened.steps(0), 1U);
}

TEST_F(CState, AMasterThatIsWrittenBecomesTheParameterWithAndWithoutAGradient) {
  constexpr StateKind kSplit{OptimizerKind::kSgd, StateFormat::kSplit};
  for (const StateKind state : {kSplit, StateKind{OptimizerKind::kSgd, StateFormat::k8Bit}}) {
    for (const char* const more : {kNvme, kHost}) {
      Opened opened(settings(state, more), dtype_of(state.format));
      std::vector<Plain> plain;
      for (unsigned p = 0; p < 2; ++p) {
        const std::vector<float> values = numbers(static_cast<std::size_t>(kCounts[p]), 40 + p);
        plain.emplace_back(state, values);
        opened.write(p, "master", values);
      }
      EXPECT_EQ(ziggurat_expect_gradients(opened.engine), ZIGGURAT_OK);
      const std::vector<float> momentum = numbers(static_cast<std::size_t>(kCounts[0]), 50);
      opened.write(0, "momentum_buffer", momentum);  // the record may be on its way by now
      EXPECT_EQ(ziggurat_set_param_steps(opened.engine, 0, 1), ZIGGURAT_OK);
      plain[0].write("momentum_buffer", momentum);
      opened.step(group_of(state.optimizer), {gradients_of(1)[0], {}});
      plain[0].step(gradients_of(1)[0], 2);
      for (unsigned p = 0; p < 2; ++p) EXPECT_EQ(opened.param(p), plain[p].param()) << more;
    }
  }
}

TEST_F(CState, TheLaterOfAWrittenParameterAndAWrittenMasterCounts) {
  for (const bool param_is_later : {false, true}) {
    Opened opened(settings(kUsual, kHost), DType::kFloat32);
    const auto values = numbers(static_cast<std::size_t>(kCounts[1]), 60);
    if (param_is_later) opened.write(1, "master", values);
    EXPECT_EQ(ziggurat_param_written(opened.engine, 1), ZIGGURAT_OK);
    if (!param_is_later) opened.write(1, "master", values);
    opened.step(group_of(kUsual.optimizer), {gradients_of(1)[0], {}});
    const auto own = numbers(static_cast<std::size_t>(kCounts[1]), 1);
    EXPECT_EQ(opened.read(1, "master"), param_is_later ? own : values);
  }
}

TEST_F(CState, RefusesWhatAParameterDoesNotHave) {
  Opened opened(settings(kUsual, kHost), DType::kFloat32);
  std::array<char, 64> text{};
  std::uint64_t needed = 0;
  ASSERT_EQ(ziggurat_state_names(opened.engine, text.data(), text.size(), &needed), ZIGGURAT_OK);
  EXPECT_STREQ(text.data(), "master\nexp_avg\nexp_avg_sq\n");
  EXPECT_EQ(needed, std::strlen(text.data()) + 1);

  std::vector<float> values(static_cast<std::size_t>(kCounts[1]));
  ziggurat_memory memory = memory_of(values);
  EXPECT_REFUSED(
      ziggurat_read_state(opened.engine, 1, "sum", &memory),
      "read_state('second', 'sum'): there is no such array: the state of adamw consists of "
      "master, exp_avg, exp_avg_sq");
  EXPECT_REFUSED(ziggurat_write_state(opened.engine, 1, "step", &memory), "write_state('second'");
  EXPECT_REFUSED(ziggurat_read_state(opened.engine, 0, "master", &memory), "105 elements");
  EXPECT_REFUSED(ziggurat_read_state(opened.engine, 2, "master", &memory), "parameter 2");
  EXPECT_REFUSED(ziggurat_read_state(opened.engine, 1, nullptr, &memory), "name is null");
  EXPECT_REFUSED(ziggurat_read_state(opened.engine, 1, "master", nullptr), "values is null");
  EXPECT_REFUSED(ziggurat_set_param_steps(opened.engine, 2, 1), "parameter 2");
  memory.dtype = ZIGGURAT_BF16;
  EXPECT_REFUSED(ziggurat_write_state(opened.engine, 1, "master", &memory), "values is in bf16");
}

}  // namespace state_test
