// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/c_unit_test.cc: parameters that the engine keeps, behind the C interface:
// the bits of parameters that are lent, in every type, saved and loaded too; and what is refused.
#include <atomic>
#include <chrono>
#include <filesystem>
#include <thread>

#include "tests/integrations/c/embedder.h"

namespace ziggurat::testing {
namespace c_unit_test {

/// Both parameters are streamed, each in a unit of its own; a twin has them in memory.
class CUnits : public Embedder {
 protected:
  static constexpr const char* kOnNvme =
      R"(, "placement": "params=nvme,optimizer=nvme", "device_memory": "1MiB")";

  void stream(DType dtype) {
    for (std::size_t p = 0; p < kParams; ++p) {
      set_values(p, initial(p, dtype));
      params_[p].values.address = nullptr;
      params_[p].unit = static_cast<std::uint32_t>(p);
    }
  }
  void write_both() {
    for (std::size_t p = 0; p < kParams; ++p) {
      const ziggurat_memory memory = memory_of(values_[p]);
      ASSERT_DONE(ziggurat_write_param(engine_, p, &memory));
    }
  }
  template <class Call>
  std::string text_of(Call call) const {
    std::string text(8192, '\0');
    EXPECT_EQ(call(engine_, text.data(), text.size(), nullptr), ZIGGURAT_OK);
    return text.c_str();
  }
  std::string folder() const { return directory_.path() + "/saved"; }
  /// Begins to save both parameters.
  ziggurat_save save_begun() {
    ziggurat_save_options saving = ZIGGURAT_INIT(ziggurat_save_options);
    saving.engine_count = 1;
    saving.engines = &engine_;
    const std::string content =
        R"({"folder": ")" + folder() +
        R"(", "step": 1, "keep_last": 0, "keep_every": 0, "model": "m", "dtype": "fp32",
          "placement": "nvme", "resume": {}, "values": [],
          "params": [{"name": "first", "shape": [3, 5, 7], "trained": true},
                     {"name": "second", "shape": [200, 200], "trained": true}],
          "engines": [[{"param": 0, "first": 0}, {"param": 1, "first": 0}]]})";
    ziggurat_save save = 0;
    EXPECT_EQ(ziggurat_save_begin(runtime_, &saving, content.c_str(), &save), ZIGGURAT_OK)
        << ziggurat_last_error();
    return save;
  }
  /// Closes the engine, and opens another from what was saved.
  void load(const char* more) {
    close();
    ziggurat_checkpoint checkpoint = 0;
    ASSERT_DONE(ziggurat_checkpoint_open(runtime_, folder().c_str(), &checkpoint));
    const std::string other = R"({"store": ")" + directory_.path() + "/other\"" + more + "}";
    ASSERT_DONE(ziggurat_engine_load(runtime_, params_.data(), kParams, other.c_str(), checkpoint,
                                     R"({"parts": [
          {"name": "first", "shape": [3, 5, 7], "first": 0},
          {"name": "second", "shape": [200, 200], "first": 0}], "steps": [1, 1],
          "weights_only": false})",
                                     &engine_));
    ASSERT_DONE(ziggurat_checkpoint_close(checkpoint));
  }
  TypedArray read(std::size_t param) const {
    TypedArray values(values_[param].dtype, kCounts[param]);
    const ziggurat_memory memory = memory_of(values);
    EXPECT_EQ(ziggurat_read_param(engine_, param, &memory), ZIGGURAT_OK) << ziggurat_last_error();
    return values;
  }
};

class CUnitBits : public CUnits,
                  public ::testing::WithParamInterface<std::tuple<DType, const char*>> {};

INSTANTIATE_TEST_SUITE_P(Formats, CUnitBits,
                         ::testing::Values(std::tuple(DType::kFloat32, "fp32"),
                                           std::tuple(DType::kFloat16, "fp32"),
                                           std::tuple(DType::kBFloat16, "split"),
                                           std::tuple(DType::kBFloat16, "8bit"),
                                           std::tuple(DType::kFloat32, "bf16-moments")),
                         [](const auto& one) {
                           std::string name = std::get<1>(one.param);
                           std::ranges::replace(name, '-', '_');
                           return std::string(to_string(std::get<0>(one.param))) + "_" + name;
                         });

TEST_P(CUnitBits, AreThoseOfParametersThatAreLent) {
  const auto& [dtype, format] = GetParam();
  const std::string kind = std::string(R"(, "state_format": ")") + format + "\"";
  std::array<TypedArray, kParams> lent;
  for (std::size_t p = 0; p < kParams; ++p) set_values(p, initial(p, dtype));
  ASSERT_DONE(open(settings(kind)));
  for (std::uint64_t s = 1; s <= 3; ++s) {
    lend_both(s);
    ASSERT_DONE(step());
  }
  for (std::size_t p = 0; p < kParams; ++p) lent[p] = updated(p);
  close();
  stream(dtype);
  const std::string streamed =
      R"({"store": ")" + directory_.path() + "/streamed\"" + kOnNvme + kind + "}";
  ASSERT_DONE(open(streamed));
  write_both();
  for (std::uint64_t s = 1; s <= 3; ++s) {
    lend_both(s);
    ASSERT_DONE(step());
    if (s != 2) continue;
    ASSERT_DONE(ziggurat_make_durable(engine_));
    reopen(streamed);
    EXPECT_EQ(state().generation, 2U);
  }
  for (std::size_t p = 0; p < kParams; ++p) EXPECT_EQ(read(p).bytes, lent[p].bytes);
}

TEST_F(CUnits, RefuseWhatDoesNotFit) {
  stream(DType::kFloat32);
  ASSERT_DONE(open(settings(kOnNvme)));
  int stream_of_a_gpu = 0;
  EXPECT_REFUSED(ziggurat_acquire(engine_, 0, &stream_of_a_gpu), "a stream was given");
  EXPECT_REFUSED(ziggurat_acquire(engine_, 2, nullptr), "has only units 0 to 1");
  EXPECT_REFUSED(ziggurat_release(engine_, 0, nullptr), "is not acquired");
  EXPECT_REFUSED(ziggurat_expect_units(engine_, nullptr, 2), "units is null");
  ziggurat_memory place = ZIGGURAT_INIT(ziggurat_memory);
  EXPECT_REFUSED(ziggurat_param_memory(engine_, 1, &place), "'second'): the parameter is away");
  EXPECT_REFUSED(ziggurat_param_memory(engine_, 7, &place), "the model has 2 parameters");
  EXPECT_REFUSED(ziggurat_param_memory(engine_, 1, nullptr), "place is null");
  EXPECT_REFUSED(ziggurat_param_written(engine_, 1), "is away");
  TypedArray half(DType::kBFloat16, kCounts[0]);
  const ziggurat_memory memory = memory_of(half);
  EXPECT_REFUSED(ziggurat_write_param(engine_, 0, &memory), "is fp32, but the memory is bf16");
  EXPECT_REFUSED(ziggurat_read_param(engine_, 1, &memory), "105 elements were given");
  std::int32_t has = 0;
  EXPECT_REFUSED(ziggurat_read_gradient(engine_, 0, &memory, &has), "give fp32 memory");
}

TEST_F(CUnits, AreFoundInOneCall) {
  stream(DType::kFloat32);
  ASSERT_DONE(open(settings(kOnNvme)));
  const std::array<std::uint64_t, kParams> params{1, 0};
  std::array<void*, kParams> addresses{};
  ASSERT_DONE(ziggurat_acquire(engine_, 1, nullptr));
  EXPECT_REFUSED(ziggurat_param_addresses(engine_, 2, params.data(), addresses.data()),
                 "'first'): the parameter is away");
  EXPECT_EQ(addresses[0], nullptr);  // none is set
  ASSERT_DONE(ziggurat_acquire(engine_, 0, nullptr));
  ASSERT_DONE(ziggurat_param_addresses(engine_, 2, params.data(), addresses.data()));
  for (std::size_t i = 0; i < kParams; ++i) {
    ziggurat_memory place = ZIGGURAT_INIT(ziggurat_memory);
    ASSERT_DONE(ziggurat_param_memory(engine_, params[i], &place));
    EXPECT_EQ(addresses[i], place.address);
  }
  ASSERT_DONE(ziggurat_param_addresses(engine_, 0, nullptr, nullptr));
  EXPECT_REFUSED(ziggurat_param_addresses(engine_, 1, nullptr, addresses.data()), "params is null");
  EXPECT_REFUSED(ziggurat_param_addresses(engine_, 1, params.data(), nullptr), "addresses is null");
  for (const std::uint32_t unit : {0, 1}) ASSERT_DONE(ziggurat_release(engine_, unit, nullptr));
}

TEST_F(CUnits, AreSavedAndLoaded) {
  stream(DType::kFloat32);
  ASSERT_DONE(open(settings(kOnNvme)));
  EXPECT_THAT(text_of(ziggurat_describe),
              ::testing::HasSubstr("in 2 units are streamed from nvme"));
  write_both();
  lend_both(1);
  ASSERT_DONE(step());
  std::array<TypedArray, kParams> saved{read(0), read(1)};
  const ziggurat_save save = save_begun();
  lend_both(2);
  ASSERT_DONE(step());  // of which the checkpoint has nothing
  ASSERT_DONE(ziggurat_save_wait(save, nullptr, 0, nullptr));
  ASSERT_DONE(ziggurat_save_close(save));
  EXPECT_NE(read(1).bytes, saved[1].bytes);
  load(kOnNvme);
  for (std::size_t p = 0; p < kParams; ++p) EXPECT_EQ(read(p).bytes, saved[p].bytes);
}

class CUnitsBeforeTheirFirstStep : public CUnits,
                                   public ::testing::WithParamInterface<const char*> {
 protected:
  TypedArray master(std::size_t param) const {
    TypedArray values(DType::kFloat32, kCounts[param]);
    const ziggurat_memory memory = memory_of(values);
    EXPECT_EQ(ziggurat_read_state(engine_, param, "master", &memory), ZIGGURAT_OK)
        << ziggurat_last_error();
    return values;
  }
};
INSTANTIATE_TEST_SUITE_P(
    Tiers, CUnitsBeforeTheirFirstStep,
    ::testing::Values(R"(, "placement": "params=host,optimizer=host", "device_memory": "1MiB")",
                      R"(, "placement": "params=nvme,optimizer=nvme", "device_memory": "1MiB")"),
    [](const auto& one) { return one.index == 0 ? "host" : "nvme"; });

// The store's first records are made at open, or in the first step: either way, of what is written.
TEST_P(CUnitsBeforeTheirFirstStep, AreSavedAndReadAsTheyWereWritten) {
  stream(DType::kFloat32);
  ASSERT_DONE(open(settings(GetParam())));
  const TypedArray first = values_[0];
  const TypedArray second = values_[1];
  write_both();
  for (std::size_t p = 0; p < kParams; ++p) EXPECT_EQ(master(p).bytes, values_[p].bytes);
  ziggurat_save save = save_begun();
  values_[1] = gradient_of(1, 9);  // of which that checkpoint has nothing
  write_both();
  ASSERT_DONE(ziggurat_save_wait(save, nullptr, 0, nullptr));
  ASSERT_DONE(ziggurat_save_close(save));
  EXPECT_EQ(master(1).bytes, values_[1].bytes);
  load(GetParam());
  EXPECT_EQ(read(0).bytes, first.bytes);
  EXPECT_EQ(master(1).bytes, second.bytes);
}

TEST_P(CUnitsBeforeTheirFirstStep, MayBeWrittenAgainAfterASave) {
  stream(DType::kFloat32);
  ASSERT_DONE(open(settings(GetParam())));
  write_both();
  for (const std::uint64_t again : {1, 2}) {
    std::filesystem::remove_all(folder());
    values_[1] = gradient_of(1, again);
    write_both();
    const ziggurat_save save = save_begun();
    ASSERT_DONE(ziggurat_save_close(save));
  }
  const TypedArray newest = values_[1];
  load(GetParam());
  EXPECT_EQ(read(1).bytes, newest.bytes);
}

TEST_P(CUnitsBeforeTheirFirstStep, AndTheirMastersCountAsTheyWereWrittenLast) {
  stream(DType::kFloat32);
  ASSERT_DONE(open(settings(GetParam())));
  TypedArray other = gradient_of(0, 3);
  const ziggurat_memory written = memory_of(other);
  for (const bool master_last : {true, false}) {
    const ziggurat_memory values = memory_of(values_[0]);
    if (master_last) {
      ASSERT_DONE(ziggurat_write_param(engine_, 0, &values));
    }
    ASSERT_DONE(ziggurat_write_state(engine_, 0, "master", &written));
    if (!master_last) {
      ASSERT_DONE(ziggurat_write_param(engine_, 0, &values));
    }
    EXPECT_EQ(master(0).bytes, master_last ? other.bytes : values_[0].bytes);
  }
  const TypedArray last = values_[0];
  const ziggurat_save save = save_begun();
  ASSERT_DONE(ziggurat_save_close(save));
  load(GetParam());
  EXPECT_EQ(read(0).bytes, last.bytes);
}

TEST_P(CUnitsBeforeTheirFirstStep, BeginWithTheValuesThatTheyAreOpenedWith) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    std::filesystem::remove_all(directory_.path() + "/store");
    stream(dtype);
    const std::array<TypedArray, kParams> first = values_;
    for (std::size_t p = 0; p < kParams; ++p) {
      params_[p].values = memory_of(values_[p]);
      params_[p].flags = ZIGGURAT_STREAMED;
    }
    ASSERT_DONE(open(settings(GetParam())));
    for (TypedArray& values : values_) std::ranges::fill(values.bytes, std::byte{0x33});
    for (std::size_t p = 0; p < kParams; ++p) {
      EXPECT_EQ(read(p).bytes, first[p].bytes);
      EXPECT_EQ(values_[p].bytes[0], std::byte{0x33});
    }
    lend_both(1);
    ASSERT_DONE(step());
    ASSERT_DONE(ziggurat_wait(engine_, ZIGGURAT_ALL_PARAMS));
    for (const TypedArray& values : values_)
      EXPECT_EQ(std::ranges::count(values.bytes, std::byte{0x33}), std::ssize(values.bytes));
    const TypedArray stepped = read(1);
    EXPECT_NE(stepped.bytes, first[1].bytes);
    ASSERT_DONE(ziggurat_make_durable(engine_));
    close();
    ASSERT_DONE(open(settings(GetParam())));
    EXPECT_EQ(state().resumed, 1);
    EXPECT_EQ(read(1).bytes, stepped.bytes) << "a store that is there has its own";
    close();
  }
}

// Nothing of it is durable, and a store of zeros would be resumed.
TEST_P(CUnitsBeforeTheirFirstStep, AreNotYetInTheStore) {
  stream(DType::kFloat32);
  for (const bool steps : {false, true}) {
    ASSERT_DONE(open(settings(GetParam())));
    EXPECT_EQ(state().resumed, 0);
    write_both();
    ASSERT_DONE(ziggurat_make_durable(engine_));
    if (steps) {
      lend_both(1);
      ASSERT_DONE(step());
      ASSERT_DONE(ziggurat_make_durable(engine_));
    }
    close();
  }
  ASSERT_DONE(open(settings(GetParam())));
  EXPECT_EQ(state().resumed, 1);
  EXPECT_EQ(state().generation, 1U);
}

TEST_F(CUnits, MayHaveFrozenParametersThatNoStoreAndNoCheckpointHas) {
  stream(DType::kFloat32);
  params_[1].unit = 0;
  params_[1].flags = ZIGGURAT_FROZEN;
  ASSERT_DONE(open(settings(kOnNvme)));
  write_both();
  for (std::uint64_t s = 1; s <= 2; ++s) {
    EXPECT_REFUSED(lend(1, gradient_of(1, s)), "'second'): the parameter is frozen");
    ASSERT_DONE(lend(0, gradient_of(0, s)));
    ASSERT_DONE(step());
  }
  EXPECT_EQ(read(1).bytes, values_[1].bytes);
  EXPECT_EQ(steps_of(0), 2U);
  EXPECT_EQ(steps_of(1), 0U);
  const TypedArray trained = read(0);
  std::vector<float> state(kCounts[1]);
  ziggurat_memory memory = ZIGGURAT_INIT(ziggurat_memory);
  memory.address = state.data();
  memory.size_bytes = state.size() * sizeof(float);
  EXPECT_REFUSED(ziggurat_read_state(engine_, 1, "master", &memory), "the parameter is frozen");
  EXPECT_REFUSED(ziggurat_add_gradient(engine_, 1, &memory, 1), "the parameter is frozen");
  const std::string folder = directory_.path() + "/saved";
  ziggurat_save_options saving = ZIGGURAT_INIT(ziggurat_save_options);
  saving.engine_count = 1;
  saving.engines = &engine_;
  const std::string content =
      R"({"folder": ")" + folder +
      R"(", "step": 2, "keep_last": 0, "keep_every": 0, "model": "m", "dtype": "fp32",
          "placement": "nvme", "resume": {}, "values": [],
          "params": [{"name": "first", "shape": [3, 5, 7], "trained": true}],
          "engines": [[{"param": 0, "first": 0}]]})";
  ASSERT_DONE(ziggurat_save_checkpoint(runtime_, &saving, content.c_str()));
  ASSERT_DONE(ziggurat_make_durable(engine_));
  close();

  ASSERT_DONE(open(settings(kOnNvme)));
  EXPECT_EQ(this->state().resumed, 1);
  EXPECT_EQ(read(0).bytes, trained.bytes);
  EXPECT_EQ(read(1).bytes, TypedArray(DType::kFloat32, kCounts[1]).bytes) << "it is in the store";
  close();

  ziggurat_checkpoint checkpoint = 0;
  ASSERT_DONE(ziggurat_checkpoint_open(runtime_, folder.c_str(), &checkpoint));
  const std::string other = R"({"store": ")" + directory_.path() + "/other\"" + kOnNvme + "}";
  ASSERT_DONE(ziggurat_engine_load(
      runtime_, params_.data(), params_.size(), other.c_str(), checkpoint,
      R"({"parts": [{"name": "first", "shape": [3, 5, 7], "first": 0}], "steps": [2],
          "weights_only": false})",
      &engine_));
  EXPECT_EQ(read(0).bytes, trained.bytes);
  EXPECT_EQ(steps_of(0), 2U);
  write_both();
  EXPECT_EQ(read(1).bytes, values_[1].bytes);
  ASSERT_DONE(ziggurat_checkpoint_close(checkpoint));
}

TEST_F(CUnits, RefuseFrozenParametersThatAreLentOrComeFirst) {
  params_[1].flags = ZIGGURAT_FROZEN;
  EXPECT_REFUSED(open(settings()), "'second' is frozen, but in the caller's memory");
  stream(DType::kFloat32);
  std::swap(params_[0].flags, params_[1].flags);
  EXPECT_REFUSED(open(settings(kOnNvme)), "give the frozen parameters after all others");
  params_[0].flags = ZIGGURAT_OPTIONAL;
  params_[1].flags = ZIGGURAT_FROZEN | ZIGGURAT_OPTIONAL;
  ASSERT_DONE(open(settings(kOnNvme)));
  close();
  params_[1].unit = 0;
  params_[1].flags = ZIGGURAT_FROZEN;
  EXPECT_REFUSED(open(settings(kOnNvme)),
                 "give the flag to all parameters of the unit, or to none");
  params_[1].unit = 1;
  params_[0].flags = 8;
  EXPECT_REFUSED(open(settings(kOnNvme)), "ZIGGURAT_OPTIONAL and ZIGGURAT_STREAMED are known");
}

TEST_F(CUnits, AreNotThoseOfParametersThatAreLent) {
  ASSERT_DONE(open(settings()));
  EXPECT_REFUSED(ziggurat_acquire(engine_, 0, nullptr), "there are no units");
  ziggurat_memory place = ZIGGURAT_INIT(ziggurat_memory);
  EXPECT_REFUSED(ziggurat_param_memory(engine_, 0, &place), "there are no units");
  EXPECT_REFUSED(ziggurat_read_param(engine_, 0, &params_[0].values),
                 "is in the caller's memory: read and write it there");
}

class CUnitThreads : public CUnits {
 protected:
  /// There is room for the second parameter, or for the first.
  void SetUp() override {
    CUnits::SetUp();
    stream(DType::kFloat32);
    ASSERT_DONE(open(
        settings(R"(, "placement": "params=host,optimizer=host", "device_memory": "240KiB")")));
  }
};

TEST_F(CUnitThreads, ThatWaitAreToldThatTheEngineIsClosed) {
  ASSERT_DONE(ziggurat_acquire(engine_, 1, nullptr));
  ziggurat_status got = ZIGGURAT_INTERNAL;
  std::string words;
  std::atomic<bool> begins = false;
  std::thread other([&] {
    begins = true;
    got = ziggurat_acquire(engine_, 0, nullptr);
    words = ziggurat_last_error();
  });
  while (!begins) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // it waits by now, most likely
  ASSERT_DONE(ziggurat_engine_close(engine_));
  other.join();
  engine_ = 0;
  if (got == ZIGGURAT_INVALID_ARGUMENT) return;  // it came after the end
  EXPECT_EQ(got, ZIGGURAT_CANCELLED);
  EXPECT_THAT(words, ::testing::HasSubstr("the engine was closed meanwhile"));
}

TEST_F(CUnitThreads, WaitForAnotherThreadsRelease) {
  ASSERT_DONE(ziggurat_acquire(engine_, 1, nullptr));
  ziggurat_status got = ZIGGURAT_INTERNAL;
  std::thread other([&] {
    got = ziggurat_acquire(engine_, 0, nullptr);
    if (got == ZIGGURAT_OK) got = ziggurat_release(engine_, 0, nullptr);
  });
  ASSERT_DONE(ziggurat_expect_gradients(engine_));  // other calls are not held up
  ASSERT_DONE(ziggurat_release(engine_, 1, nullptr));
  other.join();
  EXPECT_EQ(got, ZIGGURAT_OK) << ziggurat_last_error();
}

}  // namespace c_unit_test
}  // namespace ziggurat::testing
