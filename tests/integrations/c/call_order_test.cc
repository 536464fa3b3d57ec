// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/call_order_test.cc: calls of the C interface in random order, with good and
// bad arguments, from one thread and from several: each is a result or an error in words.
//
// ZIGGURAT_CALLS=2000000 makes more of them than the suite has time for; ZIGGURAT_SEED others.
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "integrations/c/ziggurat.h"
#include "tests/support/environment_number.h"
#include "tests/support/scratch_directory.h"

namespace {

using ziggurat::testing::number_of;

/// Handles that are open, or once were, shared by all threads.
class Known {
 public:
  /// The one that is forgotten for it; 0: none.
  std::uint64_t add(std::uint64_t handle) {
    const std::lock_guard lock(mutex_);
    handles_.push_back(handle);
    if (handles_.size() <= kRemembered) return 0;
    const std::uint64_t oldest = handles_.front();
    handles_.erase(handles_.begin());
    return oldest;
  }
  std::uint64_t any(std::mt19937_64& random) {
    const std::lock_guard lock(mutex_);
    if (handles_.empty() || random() % 50 == 0) return random() % 3 == 0 ? 0 : random();
    // Mostly the newest ones, which are open.
    const std::size_t back = random() % 4 == 0 ? random() % handles_.size() : 0;
    return handles_[handles_.size() - 1 - back];
  }
  std::vector<std::uint64_t> all() {
    const std::lock_guard lock(mutex_);
    return handles_;
  }

 private:
  static constexpr std::size_t kRemembered = 6;
  std::mutex mutex_;
  std::vector<std::uint64_t> handles_;
};

constexpr std::uint64_t kParams = 2;
/// Elements of any memory that is lent, more than a parameter has: sizes may be wrong.
constexpr std::size_t kLentElements = 64;
using Lent = std::array<float, kLentElements>;

/// What is lent stays until all engines are closed, whatever the calls say of it: only an engine
/// writes its parameters, and nobody the gradients.
class Memory {
 public:
  explicit Memory(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (Lent& gradient : gradients_) {
      for (float& value : gradient) value = static_cast<float>(random() % 200) / 100 - 1;
    }
    gradients_.back()[0] = std::numeric_limits<float>::quiet_NaN();
  }
  float* gradient(std::uint64_t number) { return gradients_[number % gradients_.size()].data(); }
  std::array<Lent, kParams>* new_params() {
    const std::lock_guard lock(mutex_);
    return all_.emplace_back(std::make_unique<std::array<Lent, kParams>>()).get();
  }
  void belongs(ziggurat_engine engine, std::array<Lent, kParams>* params) {
    const std::lock_guard lock(mutex_);
    of_engine_[engine] = params;
  }
  /// Parameters of `engine`, or of nobody.
  float* param(ziggurat_engine engine, std::uint64_t param) {
    const std::lock_guard lock(mutex_);
    const auto found = of_engine_.find(engine);
    return (found == of_engine_.end() ? nobodys_ : *found->second)[param % kParams].data();
  }

 private:
  std::mutex mutex_;
  std::array<Lent, 20> gradients_{};
  std::array<Lent, kParams> nobodys_{};
  std::vector<std::unique_ptr<std::array<Lent, kParams>>> all_;
  std::map<ziggurat_engine, std::array<Lent, kParams>*> of_engine_;
};

struct World {
  explicit World(std::uint64_t seed) : memory(seed) {}
  ~World() {
    for (const ziggurat_engine engine : engines.all()) ziggurat_engine_close(engine);
  }

  ziggurat::testing::ScratchDirectory directory;
  Memory memory;
  Known runtimes;
  Known engines;
  std::mutex opening;
  std::uint64_t opened = 0;  ///< stores, so that none is opened twice at once
};

/// One thread's calls.
class Caller {
 public:
  Caller(World& world, std::uint64_t seed) : world_(world), random_(seed) {}

  void call() {
    const std::uint64_t kind = random_() % 1000;
    if (kind < 1) return close();
    if (kind < 2) return runtime();
    if (kind < 6) return open();
    if (kind < 100) return step();
    if (kind < 110) return durable();
    if (kind < 150) return give_blob();
    if (kind < 250) return look();
    if (kind < 450) return wait();
    if (kind < 550) return expect();
    if (kind < 600) return param_moved_or_written();
    gradient();
  }

  std::array<std::uint64_t, 9> statuses{};  ///< how many calls ended with each

 private:
  bool one_in(std::uint64_t n) { return random_() % n == 0; }

  void judge(const char* call, ziggurat_status status) {
    ASSERT_GE(status, ZIGGURAT_OK) << call;
    ASSERT_LT(status, ZIGGURAT_INTERNAL) << call << ": " << ziggurat_last_error();
    ++statuses[static_cast<std::size_t>(status)];
    if (status != ZIGGURAT_OK) {
      ASSERT_STRNE(ziggurat_last_error(), "") << call;
    }
  }

  ziggurat_memory memory(float* at, std::size_t count) {
    ziggurat_memory its = ZIGGURAT_INIT(ziggurat_memory);
    its.dtype = one_in(100) ? static_cast<ziggurat_dtype>(random_()) : ZIGGURAT_FP32;
    its.address = one_in(100) ? nullptr : at;
    its.size_bytes = (one_in(100) ? random_() % kLentElements : count) * sizeof(float);
    if (one_in(200)) its.struct_size = static_cast<std::uint32_t>(random_());
    return its;
  }
  std::uint64_t param() { return one_in(100) ? random_() : random_() % kParams; }
  static std::size_t count_of(std::uint64_t param) { return param == 0 ? 6 : 40; }

  void runtime() {
    ziggurat_runtime handle = 0;
    if (one_in(2)) {
      judge("runtime_destroy", ziggurat_runtime_destroy(world_.runtimes.any(random_)));
      return;
    }
    judge("runtime_create",
          ziggurat_runtime_create(one_in(4) ? "{" : R"({"threads": 1})", &handle));
    if (handle == 0) return;
    const std::uint64_t oldest = world_.runtimes.add(handle);
    if (oldest != 0) judge("runtime_destroy", ziggurat_runtime_destroy(oldest));
  }

  std::string settings() {
    static constexpr std::array<const char*, 9> kMore{
        "",
        "",
        "",
        R"(, "placement": "optimizer=host", "durable_every": 0)",
        R"(, "placement": "optimizer=host", "durable_every": 0.001)",
        R"(, "state_format": "8bit")",
        R"(, "host_memory": "1MiB")",
        R"(, "clip": 0.5)",
        R"(, "what": 1)"};
    if (one_in(6)) return R"({"placement": "optimizer=host"})";
    const std::lock_guard lock(world_.opening);
    return R"({"store": ")" + world_.directory.path() + "/" + std::to_string(world_.opened++) +
           "\"" + kMore[random_() % kMore.size()] + "}";
  }

  void open() {
    static constexpr std::array<std::int64_t, 2> kShape{2, 3};
    static constexpr std::array<std::int64_t, 1> kVector{40};
    std::array<ziggurat_param, kParams> params{};
    std::array<Lent, kParams>* const lent = world_.memory.new_params();
    for (std::size_t p = 0; p < kParams; ++p) {
      params[p] = ZIGGURAT_INIT(ziggurat_param);
      params[p].name = p == 0 || one_in(30) ? "matrix" : "vector";
      params[p].group = one_in(20) ? 1 : 0;
      params[p].shape = p == 0 ? kShape.data() : kVector.data();
      params[p].dimensions = p == 0 ? 2 : 1;
      params[p].values = memory((*lent)[p].data(), count_of(p));
    }
    ziggurat_engine handle = 0;
    judge("engine_open",
          ziggurat_engine_open(world_.runtimes.any(random_), params.data(),
                               one_in(20) ? 0 : kParams, settings().c_str(), &handle));
    if (handle == 0) return;
    world_.memory.belongs(handle, lent);
    const std::uint64_t oldest = world_.engines.add(handle);
    if (oldest != 0) judge("engine_close", ziggurat_engine_close(oldest));
  }
  void close() { judge("engine_close", ziggurat_engine_close(world_.engines.any(random_))); }

  void gradient() {
    const ziggurat_engine engine = world_.engines.any(random_);
    if (one_in(100)) return judge("discard", ziggurat_discard_gradients(engine));
    const std::uint64_t which = param();
    if (one_in(50)) return judge("discard_gradient", ziggurat_discard_gradient(engine, which));
    if (one_in(50)) return judge("scale_gradient", ziggurat_scale_gradient(engine, which, 0.25F));
    const ziggurat_memory values = memory(world_.memory.gradient(random_()), count_of(which));
    const ziggurat_memory* const given = one_in(200) ? nullptr : &values;
    const float scale = one_in(10) ? 0.5F : 1.0F;
    if (one_in(3)) return judge("add_gradient", ziggurat_add_gradient(engine, which, given, scale));
    judge("lend_gradient", ziggurat_lend_gradient(engine, which, given, scale));
  }
  void expect() {
    const ziggurat_engine engine = world_.engines.any(random_);
    if (one_in(2)) return judge("expect_gradients", ziggurat_expect_gradients(engine));
    double norm = 0;
    judge("gradient_norm", ziggurat_gradient_norm(engine, &norm));
  }
  void wait() {
    judge("wait",
          ziggurat_wait(world_.engines.any(random_), one_in(3) ? ZIGGURAT_ALL_PARAMS : param()));
  }
  /// It stays where it is and what it is: others may be using it.
  void param_moved_or_written() {
    const ziggurat_engine engine = world_.engines.any(random_);
    const std::uint64_t which = param();
    if (one_in(2)) return judge("param_written", ziggurat_param_written(engine, which));
    const ziggurat_memory values = memory(world_.memory.param(engine, which), count_of(which));
    judge("lend_param", ziggurat_lend_param(engine, which, &values));
  }

  void step() {
    std::array<ziggurat_group, 2> groups{};
    for (ziggurat_group& group : groups) {
      group = ZIGGURAT_INIT(ziggurat_group);
      group.learning_rate = one_in(30) ? std::numeric_limits<float>::infinity() : 0.001F;
      group.beta1 = one_in(30) ? 1.5F : 0.9F;
      group.beta2 = 0.99F;
      group.eps = 1e-8F;
    }
    ziggurat_step_options options = ZIGGURAT_INIT(ziggurat_step_options);
    options.groups = one_in(50) ? nullptr : groups.data();
    options.group_count = one_in(10) ? static_cast<std::uint32_t>(random_() % 3) : 1;
    options.grad_scale = one_in(3) ? 2.0F : (one_in(20) ? kNaN : 0.0F);
    options.flags = (one_in(8) ? ZIGGURAT_BLOB_FOLLOWS : 0U) |
                    (one_in(4) ? ZIGGURAT_UPDATE_AT_ONCE : 0U) | (one_in(50) ? 4U : 0U);
    options.blob = blob_.data();
    options.blob_bytes = blob_bytes();
    ziggurat_step_result result = ZIGGURAT_INIT(ziggurat_step_result);
    judge("step", ziggurat_step(world_.engines.any(random_), &options, &result));
  }

  std::uint64_t blob_bytes() { return one_in(20) ? blob_.size() : random_() % 1000; }
  void give_blob() {
    judge("give_blob", ziggurat_give_blob(world_.engines.any(random_),
                                          one_in(50) ? nullptr : blob_.data(), blob_bytes()));
  }
  void durable() { judge("make_durable", ziggurat_make_durable(world_.engines.any(random_))); }

  void look() {
    const ziggurat_engine engine = world_.engines.any(random_);
    std::uint64_t steps = 0;
    judge("param_steps", ziggurat_param_steps(engine, param(), &steps));
    ziggurat_state state = ZIGGURAT_INIT(ziggurat_state);
    judge("engine_state", ziggurat_engine_state(engine, &state));
    if (state.blob_bytes <= blob_.size())
      judge("read_blob", ziggurat_read_blob(engine, blob_.data(), blob_.size()));
    std::array<char, 20> text{};
    std::uint64_t needed = 0;
    judge("describe", ziggurat_describe(engine, text.data(), text.size(), &needed));
    ASSERT_EQ(text.back(), '\0');
  }

  static constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  World& world_;
  std::mt19937_64 random_;
  std::vector<std::byte> blob_ = std::vector<std::byte>(1'048'577);  // more than a store holds
};

class CallOrder : public testing::TestWithParam<std::size_t> {};

INSTANTIATE_TEST_SUITE_P(Threads, CallOrder, testing::Values(1, 3),
                         [](const auto& one) { return "Of" + std::to_string(one.param); });

TEST_P(CallOrder, IsNeverMoreThanAnError) {
  const std::uint64_t calls = number_of("ZIGGURAT_CALLS", 12'000) / GetParam();
  const std::uint64_t seed = number_of("ZIGGURAT_SEED", 1);
  World world(seed);
  ziggurat_runtime runtime = 0;
  ASSERT_EQ(ziggurat_runtime_create(R"({"threads": 2})", &runtime), ZIGGURAT_OK);
  world.runtimes.add(runtime);
  std::vector<Caller> callers;
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < GetParam(); ++i) callers.emplace_back(world, seed * 100 + i);
  for (Caller& caller : callers) {
    threads.emplace_back([&] {
      for (std::uint64_t i = 0; i < calls && !testing::Test::HasFatalFailure(); ++i) caller.call();
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::array<std::uint64_t, 9> total{};
  for (const Caller& caller : callers) {
    for (std::size_t status = 0; status < total.size(); ++status)
      total[status] += caller.statuses[status];
  }
  // It was no fuzzing of closed doors.
  EXPECT_GT(total[ZIGGURAT_OK], calls / 10);
  EXPECT_GT(total[ZIGGURAT_INVALID_ARGUMENT], calls / 100);
}

}  // namespace
