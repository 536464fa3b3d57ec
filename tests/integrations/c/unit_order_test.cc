// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/unit_order_test.cc: calls on streamed parameters in random order against a
// model, which predicts the status of each call and the values that it gives. The model counts who
// holds which unit; values are those of an engine to which the same parameters are lent.
//
// ZIGGURAT_CALLS=2000000 makes more calls than the suite has time for; ZIGGURAT_SEED others.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "integrations/c/ziggurat.h"
#include "tests/support/environment_number.h"
#include "tests/support/scratch_directory.h"

namespace {

using ziggurat::testing::number_of;

struct Spec {
  const char* name;
  std::int64_t count;
  std::uint32_t unit;  // kNone: lent
  bool frozen = false;
};
constexpr std::uint32_t kNone = 99;
constexpr std::uint32_t kUnits = 3;
// Each unit has a part with records of its own, and parts that share one.
constexpr std::array<Spec, 10> kParams{{{"embedding", 17'000, 0},
                                        {"scale", 3, 0},
                                        {"first", 20'000, 1},
                                        {"bias", 77, 1},
                                        {"norm", 5, 1},
                                        {"second", 16'400, 2},
                                        {"shift", 9, 2},
                                        {"head", 50, kNone},
                                        {"base", 18'000, 1, true},
                                        {"base scale", 4, 2, true}}};
constexpr std::size_t kCount = kParams.size();
constexpr std::size_t kTrained = 8;

ziggurat_memory memory_of(std::vector<float>& values) {
  ziggurat_memory its = ZIGGURAT_INIT(ziggurat_memory);
  its.dtype = ZIGGURAT_FP32;
  its.address = values.data();
  its.size_bytes = values.size() * sizeof(float);
  return its;
}

struct Kind {
  const char* name;
  const char* placement;
  const char* more;
  bool one_unit_fits;  // and no second one beside it
};

/// An engine that streams, an engine that is lent the same but for what is frozen, and what is
/// known of both.
class Model {
 public:
  Model(const Kind& kind, std::uint64_t seed) : kind_(kind), random_(seed) {
    for (const Spec& spec : kParams) {
      lent_.emplace_back(spec.count);
      own_.emplace_back(spec.unit == kNone ? spec.count : 0);
    }
    EXPECT_EQ(ziggurat_runtime_create(R"({"threads": 2})", &runtime_), ZIGGURAT_OK);
    open();
  }
  ~Model() {
    close();
    EXPECT_EQ(ziggurat_runtime_destroy(runtime_), ZIGGURAT_OK) << ziggurat_last_error();
  }

  void call() {
    const std::uint64_t kind = random_() % 1000;
    if (kind < 2) return reopen();
    if (kind < 40) return step();
    if (kind < 60) return durable();
    if (kind < 260) return acquire();
    if (kind < 500) return release();
    if (kind < 600) return look();
    if (kind < 680) return read();
    if (kind < 720) return write();
    if (kind < 760) return write_in_place();
    if (kind < 800) return expect();
    if (kind < 850) return read_gradient();
    if (kind < 860) return norm();
    if (kind < 880) return change_gradient();
    gradient();
  }
  std::array<std::uint64_t, 10> statuses{};

 private:
  /// The gradient of the step to come: lent, or a sum.
  struct Gradient {
    std::vector<float> values{};
    float scale = 1;
    bool is_sum = false;
    std::vector<float> times_scale() const {
      std::vector<float> all = values;
      for (float& value : all) value *= scale;
      return all;
    }
  };
  bool held(std::uint32_t unit) const { return unit != kNone && pins_[unit] > 0; }
  bool any_held() const { return std::accumulate(pins_.begin(), pins_.end(), 0) > 0; }
  /// Whether a unit that is not there yet finds room beside those that are held.
  bool fits(std::uint32_t unit) const { return !kind_.one_unit_fits || held(unit) || !any_held(); }
  std::size_t any_param() { return random_() % kCount; }

  void expect_status(const char* call, ziggurat_status got, ziggurat_status predicted) {
    ASSERT_EQ(got, predicted) << call << ": " << ziggurat_last_error();
    ++statuses[static_cast<std::size_t>(got)];
  }

  void open() {
    std::array<ziggurat_param, kCount> params{};
    for (std::size_t p = 0; p < kCount; ++p) {
      params[p] = ZIGGURAT_INIT(ziggurat_param);
      params[p].name = kParams[p].name;
      params[p].shape = &kParams[p].count;
      params[p].dimensions = 1;
      params[p].values = memory_of(lent_[p]);
    }
    const auto settings = [&](const char* store, const std::string& more) {
      return R"({"store": ")" + directory_.path() + "/" + store + "\"" + more + "}";
    };
    ASSERT_EQ(ziggurat_engine_open(runtime_, params.data(), kTrained, settings("lent", "").c_str(),
                                   &twin_),
              ZIGGURAT_OK)
        << ziggurat_last_error();
    for (std::size_t p = 0; p < kCount; ++p) {
      if (kParams[p].unit == kNone) {
        params[p].values = memory_of(own_[p]);
      } else {
        params[p].values.address = nullptr;
        params[p].unit = kParams[p].unit;
        params[p].flags = kParams[p].frozen ? ZIGGURAT_FROZEN : 0;
      }
    }
    const std::string more =
        std::string(R"(, "placement": ")") + kind_.placement + "\", " + kind_.more;
    ASSERT_EQ(ziggurat_engine_open(runtime_, params.data(), kCount,
                                   settings("streamed", more).c_str(), &engine_),
              ZIGGURAT_OK)
        << ziggurat_last_error();
  }
  void close() {
    EXPECT_EQ(ziggurat_engine_close(engine_), ZIGGURAT_OK);
    EXPECT_EQ(ziggurat_engine_close(twin_), ZIGGURAT_OK);
  }
  void reopen() {
    durable();
    ziggurat_state state = ZIGGURAT_INIT(ziggurat_state);
    ASSERT_EQ(ziggurat_engine_state(engine_, &state), ZIGGURAT_OK);
    close();
    pins_ = {};
    gradients_ = {};
    lent_gradients_ = {};
    for (std::size_t p = 0; p < kCount; ++p) {
      // There is no store before the first step, and what is frozen is never in it.
      const bool kept = kParams[p].unit == kNone || (!kParams[p].frozen && state.generation > 0);
      if (!kept) std::ranges::fill(lent_[p], 0.0F);
    }
    open();
  }

  void acquire() {
    const auto unit = static_cast<std::uint32_t>(random_() % (kUnits + 1));
    const ziggurat_status got = ziggurat_acquire(engine_, unit, nullptr);
    if (unit == kUnits) return expect_status("acquire", got, ZIGGURAT_INVALID_ARGUMENT);
    expect_status("acquire", got, fits(unit) ? ZIGGURAT_OK : ZIGGURAT_RESOURCE_EXHAUSTED);
    if (got == ZIGGURAT_OK) ++pins_[unit];
  }
  void release() {
    const auto unit = static_cast<std::uint32_t>(random_() % kUnits);
    expect_status("release", ziggurat_release(engine_, unit, nullptr),
                  held(unit) ? ZIGGURAT_OK : ZIGGURAT_INVALID_ARGUMENT);
    if (held(unit)) --pins_[unit];
  }
  void expect() {
    std::array<std::uint32_t, 2> units{};
    for (std::uint32_t& unit : units) unit = static_cast<std::uint32_t>(random_() % kUnits);
    expect_status("expect_units", ziggurat_expect_units(engine_, units.data(), units.size()),
                  ZIGGURAT_OK);
  }

  /// What parameter `p` must be now.
  const std::vector<float>& expected(std::size_t p) {
    if (kParams[p].frozen) return lent_[p];
    EXPECT_EQ(ziggurat_wait(twin_, p), ZIGGURAT_OK) << ziggurat_last_error();
    return lent_[p];
  }
  void look() {
    const std::size_t p = any_param();
    ziggurat_memory place = ZIGGURAT_INIT(ziggurat_memory);
    expect_status("param_memory", ziggurat_param_memory(engine_, p, &place),
                  held(kParams[p].unit) ? ZIGGURAT_OK : ZIGGURAT_INVALID_ARGUMENT);
    if (!held(kParams[p].unit)) return;
    const std::vector<float>& values = expected(p);
    ASSERT_EQ(place.size_bytes, values.size() * sizeof(float));
    ASSERT_EQ(std::memcmp(place.address, values.data(), place.size_bytes), 0) << kParams[p].name;
  }
  void read() {
    const std::size_t p = any_param();
    std::vector<float> values(lent_[p].size() + (random_() % 20 == 0 ? 1 : 0));
    const bool sound = kParams[p].unit != kNone && values.size() == lent_[p].size();
    const ziggurat_memory memory = memory_of(values);
    const ziggurat_status got = ziggurat_read_param(engine_, p, &memory);
    if (!sound) return expect_status("read_param", got, ZIGGURAT_INVALID_ARGUMENT);
    expect_status("read_param", got,
                  fits(kParams[p].unit) ? ZIGGURAT_OK : ZIGGURAT_RESOURCE_EXHAUSTED);
    if (got != ZIGGURAT_OK) return;
    ASSERT_EQ(values, expected(p)) << kParams[p].name;
  }
  void write_twin(std::size_t p, const std::vector<float>& values) {
    expected(p);  // no update is under way
    lent_[p] = values;
    if (kParams[p].frozen) return;
    ASSERT_EQ(ziggurat_param_written(twin_, p), ZIGGURAT_OK) << ziggurat_last_error();
  }
  std::vector<float> other_values(std::size_t p) {
    std::vector<float> values(lent_[p].size());
    for (float& value : values) value = static_cast<float>(random_() % 2000) / 1000 - 1;
    return values;
  }
  void write() {
    const std::size_t p = any_param();
    std::vector<float> values = other_values(p);
    const ziggurat_memory memory = memory_of(values);
    const ziggurat_status got = ziggurat_write_param(engine_, p, &memory);
    if (kParams[p].unit == kNone)
      return expect_status("write_param", got, ZIGGURAT_INVALID_ARGUMENT);
    expect_status("write_param", got,
                  fits(kParams[p].unit) ? ZIGGURAT_OK : ZIGGURAT_RESOURCE_EXHAUSTED);
    if (got == ZIGGURAT_OK) write_twin(p, values);
  }
  void write_in_place() {
    const std::size_t p = any_param();
    if (kParams[p].unit == kNone) return;
    if (!held(kParams[p].unit)) {
      return expect_status("param_written", ziggurat_param_written(engine_, p),
                           ZIGGURAT_INVALID_ARGUMENT);
    }
    const std::vector<float> values = other_values(p);
    ziggurat_memory place = ZIGGURAT_INIT(ziggurat_memory);
    expect_status("param_memory", ziggurat_param_memory(engine_, p, &place), ZIGGURAT_OK);
    std::memcpy(place.address, values.data(), place.size_bytes);
    expect_status("param_written", ziggurat_param_written(engine_, p), ZIGGURAT_OK);
    write_twin(p, values);
  }

  void gradient() {
    const std::size_t p = any_param();
    std::vector<float> values = other_values(p);
    const float scale = random_() % 3 == 0 ? 0.5F : 1.0F;
    if (random_() % 40 == 0) {
      for (const ziggurat_engine engine : {engine_, twin_})
        expect_status("discard", ziggurat_discard_gradients(engine), ZIGGURAT_OK);
      gradients_ = {};
      return;
    }
    const bool lent = random_() % 4 == 0;
    if (kParams[p].frozen) {
      const ziggurat_memory memory = memory_of(values);
      return expect_status("gradient of a frozen parameter",
                           lent ? ziggurat_lend_gradient(engine_, p, &memory, scale)
                                : ziggurat_add_gradient(engine_, p, &memory, scale),
                           ZIGGURAT_INVALID_ARGUMENT);
    }
    if (lent) {
      lent_gradients_[0].push_back(values);
      const ziggurat_memory stays = memory_of(lent_gradients_[0].back());
      for (const ziggurat_engine engine : {engine_, twin_})
        expect_status("lend_gradient", ziggurat_lend_gradient(engine, p, &stays, scale),
                      ZIGGURAT_OK);
      gradients_[p] = {.values = values, .scale = scale};
      return;
    }
    Gradient& its = gradients_[p];
    const ziggurat_memory memory = memory_of(values);
    const bool refused = its.is_sum && its.scale != 1;
    for (const ziggurat_engine engine : {engine_, twin_}) {
      expect_status("add_gradient", ziggurat_add_gradient(engine, p, &memory, scale),
                    refused ? ZIGGURAT_INVALID_ARGUMENT : ZIGGURAT_OK);
    }
    if (refused) return;
    for (float& value : values) value *= scale;
    if (!its.values.empty()) {
      const std::vector<float> before = its.times_scale();
      for (std::size_t i = 0; i < values.size(); ++i) values[i] += before[i];
    }
    its = {.values = values, .is_sum = true};
  }
  void change_gradient() {
    const std::size_t p = any_param();
    const bool scales = random_() % 2 == 0;
    for (const ziggurat_engine engine : {engine_, twin_}) {
      if (kParams[p].frozen && engine == twin_) continue;
      expect_status(
          "scale or discard a gradient",
          scales ? ziggurat_scale_gradient(engine, p, 0.25F) : ziggurat_discard_gradient(engine, p),
          kParams[p].frozen ? ZIGGURAT_INVALID_ARGUMENT : ZIGGURAT_OK);
    }
    if (!scales) gradients_[p] = {};
    if (!gradients_[p].values.empty()) gradients_[p].scale = 0.25F;
  }
  void read_gradient() {
    const std::size_t p = any_param();
    std::vector<float> values(lent_[p].size());
    const ziggurat_memory memory = memory_of(values);
    std::int32_t has = -1;
    expect_status("read_gradient", ziggurat_read_gradient(engine_, p, &memory, &has), ZIGGURAT_OK);
    ASSERT_EQ(has, gradients_[p].values.empty() ? 0 : 1);
    if (has == 0) return;
    ASSERT_EQ(values, gradients_[p].times_scale());
  }
  void norm() {
    double own = 0;
    double twins = 0;
    expect_status("gradient_norm", ziggurat_gradient_norm(engine_, &own), ZIGGURAT_OK);
    expect_status("gradient_norm", ziggurat_gradient_norm(twin_, &twins), ZIGGURAT_OK);
    ASSERT_EQ(own, twins);
  }
  void step() {
    ziggurat_group group = ZIGGURAT_INIT(ziggurat_group);
    group.learning_rate = 0.01F;
    group.beta1 = 0.9F;
    group.beta2 = 0.99F;
    group.eps = 1e-8F;
    ziggurat_step_options options = ZIGGURAT_INIT(ziggurat_step_options);
    options.groups = &group;
    options.group_count = 1;
    ziggurat_step_result result = ZIGGURAT_INIT(ziggurat_step_result);
    const bool refused = any_held();
    expect_status("step", ziggurat_step(engine_, &options, &result),
                  refused ? ZIGGURAT_INVALID_ARGUMENT : ZIGGURAT_OK);
    if (refused) return;
    expect_status("step", ziggurat_step(twin_, &options, &result), ZIGGURAT_OK);
    gradients_ = {};
    // Both steps have begun, so the ones before have ended, and with them the use of what was lent.
    lent_gradients_[1].clear();
    std::swap(lent_gradients_[0], lent_gradients_[1]);
  }
  void durable() {
    for (const ziggurat_engine engine : {engine_, twin_})
      expect_status("make_durable", ziggurat_make_durable(engine), ZIGGURAT_OK);
  }

  Kind kind_;
  std::mt19937_64 random_;
  ziggurat::testing::ScratchDirectory directory_;
  ziggurat_runtime runtime_ = 0;
  ziggurat_engine engine_ = 0;
  ziggurat_engine twin_ = 0;
  std::vector<std::vector<float>> lent_;  // the twin's parameters, and what is frozen
  std::vector<std::vector<float>> own_;   // those that are lent to the engine too
  std::array<Gradient, kCount> gradients_;
  std::array<std::deque<std::vector<float>>, 2> lent_gradients_;  // for the step to come, and its
                                                                  // predecessor
  std::array<int, kUnits> pins_{};
};

constexpr const char* kFourMiB = R"("device_memory": "4MiB")";

class UnitOrder : public testing::TestWithParam<Kind> {};

INSTANTIATE_TEST_SUITE_P(
    Places, UnitOrder,
    testing::Values(Kind{"Nvme", "params=nvme,optimizer=nvme", kFourMiB, false},
                    Kind{"AllNvme", "all=nvme", kFourMiB, false},
                    Kind{"Host", "params=host,optimizer=host", kFourMiB, false},
                    Kind{"Device", "params=device,optimizer=nvme",
                         R"("host_memory": "2MiB", "device_memory": "4MiB")", false},
                    Kind{"NvmeOneAtATime", "params=nvme,grads=nvme,optimizer=host",
                         R"("device_memory": "352KiB")", true}),
    [](const auto& one) { return std::string(one.param.name); });

TEST_P(UnitOrder, HasTheStatusAndTheValuesThatAreRight) {
  Model model(GetParam(), number_of("ZIGGURAT_SEED", 1));
  const std::uint64_t calls = number_of("ZIGGURAT_CALLS", 20'000) / 5;
  for (std::uint64_t i = 0; i < calls && !testing::Test::HasFatalFailure(); ++i) {
    SCOPED_TRACE(testing::Message() << "call " << i);
    model.call();
  }
  EXPECT_GT(model.statuses[ZIGGURAT_OK], calls / 4);
  EXPECT_GT(model.statuses[ZIGGURAT_INVALID_ARGUMENT], calls / 100);
  if (GetParam().one_unit_fits) {
    EXPECT_GT(model.statuses[ZIGGURAT_RESOURCE_EXHAUSTED], calls / 100);
  }
}

}  // namespace
