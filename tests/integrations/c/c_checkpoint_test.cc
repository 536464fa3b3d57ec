// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/c_checkpoint_test.cc: checkpoints through libziggurat.so: of parameters that
// several engines have parts of, in every format; what makes no whole is refused; and one that is
// closed while another thread reads it.
#include <filesystem>
#include <memory>
#include <thread>

#include "tests/integrations/c/embedder.h"
#include "tests/support/held_memory.h"

namespace ziggurat::testing {
namespace c_checkpoint_test {

constexpr std::int64_t kCount = 10'000;

std::vector<float> values_from(std::int64_t first, std::int64_t count, float scale) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i)
    values[static_cast<std::size_t>(i)] = scale * static_cast<float>((first + i) % 97 - 48);
  return values;
}

ziggurat_memory memory_of(std::vector<float>& values) {
  ziggurat_memory its = ZIGGURAT_INIT(ziggurat_memory);
  its.dtype = ZIGGURAT_FP32;
  its.address = values.data();
  its.size_bytes = values.size() * sizeof(float);
  return its;
}

/// An engine that has elements of "w" from `first` on, in memory.
class PartEngine {
 public:
  PartEngine(ziggurat_runtime runtime, const std::string& format, std::int64_t first,
             std::int64_t count)
      : first_(first), values_(values_from(first, count, 0.01F)) {
    ziggurat_param param = ZIGGURAT_INIT(ziggurat_param);
    param.name = "w";
    param.shape = &count;
    param.dimensions = 1;
    param.values = memory_of(values_);
    const std::string settings =
        R"({"placement": "optimizer=host", "state_format": ")" + format + "\"}";
    EXPECT_EQ(ziggurat_engine_open(runtime, &param, 1, settings.c_str(), &engine_), ZIGGURAT_OK)
        << ziggurat_last_error();
  }
  ~PartEngine() { EXPECT_EQ(ziggurat_engine_close(engine_), ZIGGURAT_OK); }
  PartEngine(const PartEngine&) = delete;
  PartEngine& operator=(const PartEngine&) = delete;

  ziggurat_engine handle() const { return engine_; }
  std::int64_t first() const { return first_; }
  void step() {
    gradient_ = values_from(first_ + 5, static_cast<std::int64_t>(values_.size()), 0.001F);
    const ziggurat_memory gradient = memory_of(gradient_);
    ASSERT_DONE(ziggurat_lend_gradient(engine_, 0, &gradient, 1));
    ziggurat_group adamw = ZIGGURAT_INIT(ziggurat_group);
    adamw.learning_rate = 0.01F;
    adamw.beta1 = 0.9F;
    adamw.beta2 = 0.99F;
    adamw.eps = 1e-8F;
    ziggurat_step_options options = ZIGGURAT_INIT(ziggurat_step_options);
    options.group_count = 1;
    options.groups = &adamw;
    ziggurat_step_result result = ZIGGURAT_INIT(ziggurat_step_result);
    ASSERT_DONE(ziggurat_step(engine_, &options, &result));
    ASSERT_DONE(ziggurat_wait(engine_, ZIGGURAT_ALL_PARAMS));
  }
  std::vector<float> state(const char* name) const {
    std::vector<float> its(values_.size());
    const ziggurat_memory memory = memory_of(its);
    EXPECT_EQ(ziggurat_read_state(engine_, 0, name, &memory), ZIGGURAT_OK) << ziggurat_last_error();
    return its;
  }

 private:
  std::int64_t first_;
  std::vector<float> values_;
  std::vector<float> gradient_;
  ziggurat_engine engine_ = 0;
};

class CCheckpoint : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_DONE(ziggurat_runtime_create(R"({"threads": 1})", &runtime_)); }
  void TearDown() override { EXPECT_EQ(ziggurat_runtime_destroy(runtime_), ZIGGURAT_OK); }

  /// A checkpoint of `parts`, as FOLDER/step-000000001.
  ziggurat_status save(const std::vector<const PartEngine*>& parts,
                       const std::vector<char>& blob = {}, const std::string& more = "",
                       ziggurat_save* beside = nullptr) {
    std::vector<ziggurat_engine> engines;
    std::string pieces;
    for (const PartEngine* part : parts) {
      engines.push_back(part->handle());
      pieces += (pieces.empty() ? "" : ", ") + std::string(R"([{"param": 0, "first": )") +
                std::to_string(part->first()) + "}]";
    }
    ziggurat_save_options options = ZIGGURAT_INIT(ziggurat_save_options);
    options.engine_count = static_cast<std::uint32_t>(engines.size());
    options.engines = engines.data();
    options.blob = blob.data();
    options.blob_bytes = blob.size();
    const std::string content =
        R"({"folder": ")" + folder_ +
        R"(", "step": 1, "keep_last": 0, "keep_every": 0, "model": "m", "dtype": "fp32",
            "placement": "host", "resume": {}, "params": [{"name": "w", "shape": [10000],
            "trained": true}], "engines": [)" +
        pieces + R"(], "values": [])" + more + "}";
    if (beside != nullptr) return ziggurat_save_begin(runtime_, &options, content.c_str(), beside);
    return ziggurat_save_checkpoint(runtime_, &options, content.c_str());
  }
  /// Begins a save that takes about a second.
  ziggurat_save begun(const std::vector<const PartEngine*>& parts, const std::string& more = "") {
    ziggurat_save save_of = 0;
    EXPECT_EQ(save(parts, {}, R"(, "memory": 1000000, "bandwidth": 120000)" + more, &save_of),
              ZIGGURAT_OK)
        << ziggurat_last_error();
    return save_of;
  }
  ziggurat_checkpoint opened() {
    ziggurat_checkpoint checkpoint = 0;
    EXPECT_EQ(ziggurat_checkpoint_open(runtime_, folder_.c_str(), &checkpoint), ZIGGURAT_OK)
        << ziggurat_last_error();
    return checkpoint;
  }

  const ScratchDirectory directory_;
  const std::string folder_ = directory_.path() + "/saved";
  ziggurat_runtime runtime_ = 0;
};

class CCheckpointFormats : public CCheckpoint, public ::testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(Formats, CCheckpointFormats,
                         ::testing::Values("fp32", "bf16-moments", "8bit"), [](const auto& its) {
                           std::string name = its.param;
                           std::erase(name, '-');
                           return name;
                         });

TEST_P(CCheckpointFormats, OfAParameterInPartsIsThatOfTheWhole) {
  PartEngine low(runtime_, GetParam(), 0, 4000);
  PartEngine high(runtime_, GetParam(), 4000, kCount - 4000);
  low.step();
  high.step();
  ASSERT_DONE(save({&low, &high}));
  const ziggurat_checkpoint checkpoint = opened();
  constexpr std::array<const char*, 3> kNames{"master", "exp_avg", "exp_avg_sq"};
  for (std::uint64_t tensor = 0; tensor < kNames.size(); ++tensor) {
    std::vector<float> expected = low.state(kNames[tensor]);
    const std::vector<float> rest = high.state(kNames[tensor]);
    expected.insert(expected.end(), rest.begin(), rest.end());
    std::vector<float> read(kCount);
    const ziggurat_memory memory = memory_of(read);
    EXPECT_EQ(ziggurat_checkpoint_read(checkpoint, tensor, 0, &memory), ZIGGURAT_OK)
        << ziggurat_last_error();
    EXPECT_EQ(read, expected) << kNames[tensor];
  }
  ASSERT_DONE(ziggurat_checkpoint_close(checkpoint));
}

TEST_F(CCheckpoint, ThatIsWidenedHasTheValuesOfCodes) {
  PartEngine whole(runtime_, "8bit", 0, kCount);
  whole.step();
  ASSERT_DONE(save({&whole}, {}, R"(, "widened": true)"));
  const ziggurat_checkpoint checkpoint = opened();
  std::vector<float> read(kCount);
  const ziggurat_memory memory = memory_of(read);
  ASSERT_DONE(ziggurat_checkpoint_read(checkpoint, 1, 0, &memory));
  EXPECT_EQ(read, whole.state("exp_avg"));
  ASSERT_DONE(ziggurat_checkpoint_close(checkpoint));
}

TEST_F(CCheckpoint, OfPartsThatMakeNoWholeIsRefusedAndNotThere) {
  const PartEngine low(runtime_, "fp32", 0, 5000);
  const PartEngine middle(runtime_, "fp32", 2500, 5000);
  const PartEngine high(runtime_, "fp32", 5000, 5000);
  EXPECT_REFUSED(save({&low, &middle}), "of 'w' were given twice");
  EXPECT_REFUSED(save({&low}), "have only 5000 of its 10000 elements");
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/step-000000001"));
  ASSERT_DONE(save({&low, &high}));
}

TEST_F(CCheckpoint, HasOneKindOfState) {
  const PartEngine low(runtime_, "fp32", 0, 5000);
  const PartEngine high(runtime_, "bf16-moments", 5000, 5000);
  EXPECT_REFUSED(save({&low, &high}), "one \"state_format\"");
}

// The thread that copies stands in the caller's memory when another closes the checkpoint.
TEST_F(CCheckpoint, ThatIsClosedWhileItsBlobIsReadStaysUntilItIs) {
  {
    const PartEngine whole(runtime_, "fp32", 0, kCount);
    std::vector<char> blob(std::size_t{1} << 20);
    for (std::size_t i = 0; i < blob.size(); ++i) blob[i] = static_cast<char>(i % 251);
    ASSERT_DONE(save({&whole}, blob));
  }
  const ziggurat_checkpoint checkpoint = opened();
  HeldMemory room(std::size_t{1} << 20);
  room.hold();
  ziggurat_status status = ZIGGURAT_INTERNAL;
  std::thread reading([&] {
    status = ziggurat_checkpoint_blob(checkpoint, room.bytes().data(), room.bytes().size());
  });
  room.await_touched();
  EXPECT_EQ(ziggurat_checkpoint_close(checkpoint), ZIGGURAT_OK);
  room.release();
  reading.join();
  EXPECT_EQ(status, ZIGGURAT_OK);
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < room.bytes().size(); ++i)
    wrong += room.bytes()[i] == static_cast<std::byte>(i % 251) ? 0 : 1;
  EXPECT_EQ(wrong, 0U);
}

TEST_F(CCheckpoint, ThatIsSavedBesideStepsIsOfTheStepAtWhichItWasBegun) {
  PartEngine low(runtime_, "fp32", 0, 4000);
  PartEngine high(runtime_, "fp32", 4000, kCount - 4000);
  low.step();
  high.step();
  std::vector<float> expected = low.state("master");
  const std::vector<float> rest = high.state("master");
  expected.insert(expected.end(), rest.begin(), rest.end());
  const ziggurat_save beside = begun({&low, &high});
  for (int step = 0; step < 3; ++step) {
    low.step();
    high.step();
  }
  std::int32_t under_way = 0;
  ASSERT_DONE(ziggurat_save_under_way(beside, &under_way));
  EXPECT_EQ(under_way, 1);
  std::array<char, 4096> directory{};
  for (int time = 0; time < 2; ++time) {
    ASSERT_DONE(ziggurat_save_wait(beside, directory.data(), directory.size(), nullptr));
    EXPECT_EQ(directory.data(), folder_ + "/step-000000001");
  }
  ASSERT_DONE(ziggurat_save_under_way(beside, &under_way));
  EXPECT_EQ(under_way, 0);
  ASSERT_DONE(ziggurat_save_close(beside));
  EXPECT_REFUSED(ziggurat_save_wait(beside, nullptr, 0, nullptr), "there is no save");
  const ziggurat_checkpoint checkpoint = opened();
  std::vector<float> read(kCount);
  const ziggurat_memory memory = memory_of(read);
  ASSERT_DONE(ziggurat_checkpoint_read(checkpoint, 0, 0, &memory));
  EXPECT_EQ(read, expected);
  ASSERT_DONE(ziggurat_checkpoint_close(checkpoint));
}

TEST_F(CCheckpoint, IsWaitedForWhenItsSaveIsClosed) {
  PartEngine whole(runtime_, "fp32", 0, kCount);
  const ziggurat_save beside = begun({&whole});
  ASSERT_DONE(ziggurat_save_close(beside));
  EXPECT_TRUE(std::filesystem::exists(folder_ + "/step-000000001/manifest.json"));
}

TEST_F(CCheckpoint, IsNotMadeIfAnEngineIsClosedBeforeItIsSaved) {
  ziggurat_save beside = 0;
  {
    const PartEngine whole(runtime_, "fp32", 0, kCount);
    beside = begun({&whole});
  }
  EXPECT_EQ(ziggurat_save_wait(beside, nullptr, 0, nullptr), ZIGGURAT_CANCELLED);
  EXPECT_THAT(ziggurat_last_error(), ::testing::HasSubstr("engine was closed"));
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/step-000000001"));
  EXPECT_REFUSED(ziggurat_runtime_destroy(runtime_), "saves or checkpoints");
  ASSERT_DONE(ziggurat_save_close(beside));
}

TEST_F(CCheckpoint, OfAnEngineIsSavedOneAtATime) {
  PartEngine whole(runtime_, "fp32", 0, kCount);
  const ziggurat_save first = begun({&whole});
  ziggurat_save second = 0;
  ASSERT_DONE(save({&whole}, {}, "", &second));
  EXPECT_REFUSED(ziggurat_save_wait(second, nullptr, 0, nullptr), "under way");
  ASSERT_DONE(ziggurat_save_close(second));
  ASSERT_DONE(ziggurat_save_wait(first, nullptr, 0, nullptr));
  ASSERT_DONE(ziggurat_save_close(first));
}

TEST_F(CCheckpoint, IsSavedForOtherRanksOnlyWhileTheCallerWaits) {
  PartEngine whole(runtime_, "fp32", 0, kCount);
  ziggurat_save beside = 0;
  const std::string others =
      R"(, "alone": true, "others": [{"engine": 0, "rank": 0, "name": "w", "param": 0, "first": 0,
          "count": 10000}])";
  EXPECT_REFUSED(save({&whole}, {}, others, &beside), "beside steps");
  EXPECT_EQ(beside, 0U);
}

}  // namespace c_checkpoint_test
}  // namespace ziggurat::testing
