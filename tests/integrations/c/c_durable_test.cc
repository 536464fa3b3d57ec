// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/c_durable_test.cc: what a trainer behind the C interface finds again: its
// parameters, its blob, each parameter's count of steps; and when it has which.
#include <filesystem>
#include <memory>

#include "tests/integrations/c/embedder.h"

namespace ziggurat::testing {
namespace c_durable_test {

constexpr std::size_t kMiB = std::size_t{1} << 20;

/// With records on NVMe, and on the host beside a store.
class CDurable : public Embedder, public ::testing::WithParamInterface<const char*> {
 protected:
  std::string here() const { return settings(GetParam() == std::string("host") ? kOnHost : ""); }
  ziggurat_step_options with_blob(const std::string& blob) const {
    ziggurat_step_options its = options();
    its.blob = blob.data();
    its.blob_bytes = blob.size();
    return its;
  }
  ziggurat_step_options blob_follows() const {
    ziggurat_step_options its = options();
    its.flags = ZIGGURAT_BLOB_FOLLOWS;
    return its;
  }
  /// With state on NVMe a store begins with its first step.
  void make_a_step() {
    lend_both(1);
    ASSERT_DONE(step());
    ASSERT_DONE(ziggurat_make_durable(engine_));
  }
  ziggurat_status give_blob(const std::string& blob) const {
    return ziggurat_give_blob(engine_, blob.data(), blob.size());
  }
};

INSTANTIATE_TEST_SUITE_P(Tiers, CDurable, ::testing::Values("nvme", "host"),
                         [](const auto& one) { return std::string(one.param); });

TEST_P(CDurable, SaysWhatAStoreHasBeforeItIsOpened) {
  const auto stored = [&] {
    std::uint64_t needed = 0;
    EXPECT_EQ(ziggurat_stored_params(runtime_, here().c_str(), nullptr, 0, &needed), ZIGGURAT_OK)
        << ziggurat_last_error();
    std::string text(needed, '\0');
    EXPECT_EQ(ziggurat_stored_params(runtime_, here().c_str(), text.data(), text.size(), nullptr),
              ZIGGURAT_OK);
    return std::string(text.c_str());
  };
  EXPECT_EQ(stored(), "[]");
  ASSERT_DONE(open(here()));
  make_a_step();
  const std::string all = R"([{"dtype":"fp32","name":"first","shape":[3,5,7],"whole":null},)"
                          R"({"dtype":"fp32","name":"second","shape":[200,200],"whole":null}])";
  EXPECT_EQ(stored(), all);  // while it trains
  close();
  EXPECT_EQ(stored(), all);
}

TEST_P(CDurable, ListsWhatDiffersFromAStoreOfOtherParameters) {
  ASSERT_DONE(open(here()));
  make_a_step();
  close();
  params_[1].name = "third";
  EXPECT_REFUSED(open(here()), "the store lacks: third; this program lacks: second");
  std::swap(params_[0], params_[1]);
  params_[0].name = "second";
  EXPECT_REFUSED(open(here()),
                 "their parameters differ in order, in type or in which of them decay");
}

TEST_P(CDurable, ResumesWithParametersBlobAndCounts) {
  ASSERT_DONE(open(here()));
  EXPECT_EQ(state().resumed, 0);
  std::vector<PlainParam> expected{PlainParam(values_[0]), PlainParam(values_[1])};
  lend_both(1);
  ASSERT_DONE(step());
  ASSERT_DONE(lend(0, gradient_of(0, 2)));
  const std::string blob = "where the loader stood";
  ASSERT_DONE(step(with_blob(blob)));
  ASSERT_DONE(ziggurat_make_durable(engine_));
  EXPECT_EQ(state().durable_generation, 2U);
  reopen(here());
  EXPECT_EQ(state().resumed, 1);
  EXPECT_EQ(state().generation, 2U);
  EXPECT_EQ(state().durable_generation, 2U);
  EXPECT_EQ(this->blob(), blob);
  EXPECT_EQ(steps_of(0), 2U);
  EXPECT_EQ(steps_of(1), 1U);

  for (std::uint64_t t = 1; t <= 2; ++t) expected[0].step(scalars(0, t), gradient_of(0, t));
  expected[1].step(scalars(1, 1), gradient_of(1, 1));
  for (std::size_t p = 0; p < kParams; ++p) EXPECT_EQ(values_[p], expected[p].values()) << p;
  lend_both(3);
  ASSERT_DONE(step());
  expected[0].step(scalars(0, 3), gradient_of(0, 3));
  expected[1].step(scalars(1, 2), gradient_of(1, 3));
  for (std::size_t p = 0; p < kParams; ++p) EXPECT_EQ(updated(p), expected[p].values()) << p;
}

TEST_P(CDurable, ResumesWhatTheTrainerWroteInTheLastStep) {
  set_values(1, initial(1, DType::kBFloat16));
  ASSERT_DONE(open(here()));
  for (std::size_t p = 0; p < kParams; ++p) {
    for (std::size_t i = 0; i < kCounts[p]; i += 2) values_[p].set(i, 0.123F);
    ASSERT_DONE(ziggurat_param_written(engine_, p));
  }
  ASSERT_DONE(step());
  ASSERT_DONE(ziggurat_make_durable(engine_));
  const std::array<TypedArray, kParams> written = values_;
  reopen(here());
  EXPECT_EQ(values_[0], written[0]);
  EXPECT_EQ(values_[1], written[1]);
}

TEST_P(CDurable, HoldsABlobOfAMegabyteAndRefusesALongerOne) {
  ASSERT_DONE(open(here()));
  lend_both(1);
  EXPECT_REFUSED(step(with_blob(std::string(kMiB + 1, 'x'))), "1048577 bytes");
  EXPECT_EQ(state().generation, 0U);
  std::string blob(kMiB, 'x');
  blob.back() = 'y';
  ASSERT_DONE(step(with_blob(blob)));
  ASSERT_DONE(ziggurat_make_durable(engine_));
  reopen(here());
  EXPECT_TRUE(this->blob() == blob);
}

TEST_P(CDurable, AStepWhoseBlobFollowsIsDurableOnceItIsGiven) {
  ASSERT_DONE(open(here()));
  EXPECT_REFUSED(give_blob("too early"), "does not wait for a blob");
  lend_both(1);
  ASSERT_DONE(step(blob_follows()));
  ASSERT_DONE(ziggurat_wait(engine_, ZIGGURAT_ALL_PARAMS));
  lend_both(2);
  EXPECT_REFUSED(step(), "call give_blob() first");
  EXPECT_REFUSED(ziggurat_make_durable(engine_), "call give_blob() first");
  EXPECT_REFUSED(give_blob(std::string(kMiB + 1, 'x')), "1048577 bytes");
  EXPECT_EQ(state().durable_generation, 0U);
  std::string blob(kMiB, 'b');
  ASSERT_DONE(give_blob(blob));
  EXPECT_REFUSED(give_blob("again"), "does not wait for a blob");
  blob.assign(kMiB, 'c');  // it was copied
  ASSERT_DONE(ziggurat_make_durable(engine_));
  EXPECT_EQ(state().durable_generation, 1U);
  reopen(here());
  EXPECT_TRUE(this->blob() == std::string(kMiB, 'b'));
  EXPECT_EQ(steps_of(0), 1U);
  EXPECT_EQ(steps_of(1), 1U);
}

TEST_P(CDurable, MemoryIsTheTrainersOnceTheEngineIsClosedInMidUpdate) {
  ASSERT_DONE(open(here()));
  PlainParam expected(values_[1]);
  make_a_step();
  expected.step(scalars(1, 1), gradient_of(1, 1));
  const TypedArray before = updated(1);
  auto gradient = std::make_unique<TypedArray>(gradient_of(1, 2));
  const ziggurat_memory memory = memory_of(*gradient);
  ASSERT_DONE(ziggurat_lend_gradient(engine_, 1, &memory, 1));
  ASSERT_DONE(step());
  close();
  gradient.reset();
  for (TypedArray& values : values_) {
    values.bytes = std::vector<std::byte>(values.bytes.size());
  }
  for (std::size_t p = 0; p < kParams; ++p) params_[p].values = memory_of(values_[p]);
  ASSERT_DONE(open(here()));
  expected.step(scalars(1, 2), gradient_of(1, 2));
  EXPECT_EQ(values_[1], state().generation == 1 ? before : expected.values());
}

class CMemoryAlone : public Embedder {};

TEST_F(CMemoryAlone, WithoutAStoreNothingIsEverDurable) {
  const std::string in_memory = R"({"placement": "optimizer=host"})";
  ASSERT_DONE(open(in_memory));
  lend_both(1);
  ASSERT_DONE(step());
  EXPECT_REFUSED(ziggurat_make_durable(engine_), "opened without \"store\"");
  EXPECT_EQ(state().generation, 1U);
  EXPECT_EQ(state().durable_generation, 0U);
  std::array<char, 4096> text{};
  ASSERT_DONE(ziggurat_describe(engine_, text.data(), text.size(), nullptr));
  EXPECT_THAT(text.data(), ::testing::HasSubstr("nothing is durable"));
  const TypedArray left = updated(1);
  close();
  ASSERT_DONE(open(in_memory));
  EXPECT_EQ(state().resumed, 0);
  EXPECT_EQ(values_[1], left) << "what a new engine begins with";
}

TEST_F(CMemoryAlone, TheEngineChoosesItWhereTheStateFitsAndSaysWhy) {
  ASSERT_DONE(open(R"({"placement": "auto"})"));
  std::array<char, 4096> text{};
  ASSERT_DONE(ziggurat_describe(engine_, text.data(), text.size(), nullptr));
  EXPECT_THAT(text.data(),
              ::testing::HasSubstr("placement auto: the engine chose "
                                   "params=host,grads=host,optimizer=host: the state takes "));
  EXPECT_THAT(text.data(), ::testing::HasSubstr("nothing is durable"));
  lend_both(1);
  ASSERT_DONE(step());
}

class CPlacement : public Embedder {
 protected:
  ziggurat_status choose(const std::string& its, std::uint64_t free_bytes) {
    return ziggurat_choose_placement(params_.data(), params_.size(), its.c_str(), free_bytes,
                                     text_.data(), text_.size(), nullptr);
  }
  std::array<char, 4096> text_{};
};

TEST_F(CPlacement, IsToldBeforeAnythingIsOpened) {
  std::uint64_t free_bytes = 0;
  ASSERT_DONE(ziggurat_free_memory(&free_bytes));
  EXPECT_GT(free_bytes, 0U);
  EXPECT_REFUSED(ziggurat_free_memory(nullptr), "free_bytes is null");
  ASSERT_DONE(choose("{}", 1U << 30));
  EXPECT_STREQ(text_.data(),
               R"({"beside_nvme_bytes":0,"placement":"params=host,grads=host,optimizer=host",)"
               R"("state_bytes":786432,"why":"the state takes 768.0 KiB, and may take up to half )"
               R"(of the 1.00 GiB of free memory"})");
  ASSERT_DONE(choose(settings(), 1U << 20));
  EXPECT_THAT(text_.data(), ::testing::HasSubstr("optimizer=nvme"));
  ASSERT_DONE(choose(settings(R"(, "host_memory": "1MiB")"), 0));
  EXPECT_THAT(text_.data(), ::testing::HasSubstr("optimizer=host"));
  EXPECT_FALSE(std::filesystem::exists(directory_.path() + "/store"));
}

TEST_F(CPlacement, IsChosenTogetherWithMemoryForUnits) {
  const auto memory = [&](const char* facts) {
    return ziggurat_choose_memory(params_.data(), params_.size(), settings().c_str(), facts,
                                  text_.data(), text_.size(), nullptr);
  };
  ASSERT_DONE(memory(R"({"units_least_bytes": 1048576, "units_all_bytes": 2097152,
                         "brought_bytes": 2097152, "live_there": true, "gradient_bytes": 2097152,
                         "free_bytes": 1073741824})"));
  EXPECT_THAT(text_.data(), ::testing::HasSubstr(R"("memory":2097152,)"));
  EXPECT_THAT(text_.data(),
              ::testing::HasSubstr(R"("placement":"params=device,grads=host,optimizer=host")"));
  EXPECT_THAT(text_.data(), ::testing::HasSubstr(R"("host_memory":0,)"));
  ASSERT_DONE(memory(R"({"optimizer": "nvme", "params": "nvme", "memory": 3145728,
                         "free_bytes": 1073741824})"));
  EXPECT_THAT(text_.data(),
              ::testing::HasSubstr(R"("placement":"params=nvme,grads=host,optimizer=nvme")"));
  EXPECT_EQ(memory(R"({"free_bytes": 65536})"), ZIGGURAT_RESOURCE_EXHAUSTED);
  EXPECT_THAT(ziggurat_last_error(), ::testing::HasSubstr("the least that works is 1.0 MiB"));
  EXPECT_REFUSED(memory(R"({"free_byte": 1})"), "facts: unknown key \"free_byte\"");
  EXPECT_REFUSED(memory(R"({"free_bytes": "much"})"),
                 "facts: \"free_bytes\" must be a whole number below 2^56");
  EXPECT_REFUSED(memory(R"({"beside_bytes": 18446744073709551615, "free_bytes": 1073741824})"),
                 "facts: \"beside_bytes\" must be a whole number below 2^56");
  EXPECT_REFUSED(memory(R"({"params": "disk"})"), "facts: \"params\" must be \"host\" or \"nvme\"");
  EXPECT_REFUSED(memory("[]"), "facts: the text must be a JSON object");
  EXPECT_FALSE(std::filesystem::exists(directory_.path() + "/store"));
}

TEST_F(CPlacement, DividesHostMemoryBeforeAnythingIsOpened) {
  const auto divide = [&](const char* its, std::uint64_t host_bytes,
                          std::int32_t kind = ZIGGURAT_HOST_MEMORY) {
    return ziggurat_plan_host_memory(params_.data(), params_.size(), its, host_bytes, kind,
                                     text_.data(), text_.size(), nullptr);
  };
  const char* const on_nvme = R"({"placement": "optimizer=nvme"})";
  // Records of 1 and 3 tiles of 192 KiB. The larger one takes a page more in the pool.
  ASSERT_DONE(divide(on_nvme, 0));
  EXPECT_STREQ(text_.data(),
               R"({"all_bytes":7917568,"budget_bytes":7127040,"item_bytes":589824,"items":10,)"
               R"("params_file_bytes":0,"read_bytes":0,"records":2,"smallest_bytes":593920,)"
               R"("store_bytes":4325376,"sums_file_bytes":0})");
  // With the least each tile is a record. A third of it is the parameter, which is in memory.
  ASSERT_DONE(divide(on_nvme, 196'608));
  EXPECT_STREQ(text_.data(),
               R"({"all_bytes":7917568,"budget_bytes":196608,"item_bytes":196608,"items":1,)"
               R"("params_file_bytes":0,"read_bytes":524288,"records":4,"smallest_bytes":196608,)"
               R"("store_bytes":4325376,"sums_file_bytes":0})");
  ASSERT_DONE(divide(on_nvme, 196'607));
  EXPECT_THAT(text_.data(), ::testing::HasSubstr(R"("smallest_bytes":196608)"));
  EXPECT_REFUSED(divide("{}", 0, 2),
                 "kind is 2: give ZIGGURAT_HOST_MEMORY or ZIGGURAT_CUDA_MEMORY");
  EXPECT_REFUSED(divide(nullptr, 0), "settings is null");
  // The product of which is 0 in 64 bits.
  constexpr std::array<std::int64_t, 2> kHuge = {std::int64_t{1} << 32, std::int64_t{1} << 32};
  params_[1].shape = kHuge.data();
  params_[1].dimensions = kHuge.size();
  EXPECT_REFUSED(divide(on_nvme, 0),
                 "of shape [4294967296, 4294967296] has more than 1099511627776 elements");
}

TEST_F(CPlacement, OfWhatFitsNowhereIsAnErrorThatSaysWhatHelps) {
  EXPECT_REFUSED(choose("{}", 1U << 20),
                 "\"placement\": \"auto\": the state takes 768.0 KiB, and may take up to half of "
                 "the 1.0 MiB of free memory. Give \"store\", a directory on a drive, or "
                 "\"placement\": \"optimizer=host\" to take the memory all the same");
  params_[1].name = "first";
  EXPECT_REFUSED(choose("{}", 1U << 30), "two parameters have the name 'first'");
}

}  // namespace c_durable_test
}  // namespace ziggurat::testing
