// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/c_wholes_test.cc: ranks behind the C interface that keep slices and are
// brought whole parameters: the numbers of these, what is refused by name, and how a job ends whose
// ranks wait for each other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "integrations/c/ziggurat.hpp"
#include "tests/integrations/c/on_ranks.h"

namespace c_wholes_test {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ziggurat::testing::on_ranks;

constexpr std::size_t kCount = 40'001;
constexpr std::size_t kFirstOfRank1 = 25'000;

/// `call` throws an error of that status, whose words are given back.
std::string refusal(ziggurat_status status, const std::function<void()>& call) {
  try {
    call();
  } catch (const ziggurat::Error& error) {
    EXPECT_EQ(error.status(), status) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "accepted";
  return "accepted";
}
std::string wrong(const std::function<void()>& call) {
  return refusal(ZIGGURAT_INVALID_ARGUMENT, call);
}

/// A rank of two has a slice of "weight", and rank 0 "scale".
std::vector<ziggurat::Param> params_of(int rank) {
  auto streamed = ZIGGURAT_INIT(ziggurat_memory);
  streamed.dtype = ZIGGURAT_FP32;
  std::vector<ziggurat::Param> params;
  const std::size_t count = rank == 0 ? kFirstOfRank1 : kCount - kFirstOfRank1;
  params.push_back({.name = "weight",
                    .shape = {static_cast<std::int64_t>(count)},
                    .values = streamed,
                    .group = 0,
                    .unit = 0,
                    .flags = ZIGGURAT_STREAMED});
  if (rank == 0) {
    params.push_back({.name = "scale",
                      .shape = {1},
                      .values = streamed,
                      .group = 0,
                      .unit = 1,
                      .flags = ZIGGURAT_STREAMED});
  }
  return params;
}
std::string weight_of(int rank) {
  return R"({"name": "weight", "count": 40001, "dtype": "fp32", "unit": 0, "param": 0, "first": )" +
         std::to_string(rank == 0 ? 0 : kFirstOfRank1) + "}";
}
std::string scale_of(int rank) {
  return std::string(R"({"name": "scale", "count": 1, "dtype": "fp32", "unit": 1)") +
         (rank == 0 ? R"(, "param": 1, "first": 0})" : R"(, "param": null})");
}
std::string settings_of(const std::string& wholes) {
  return R"({"placement": "params=host,optimizer=host", "device_memory": "1MiB", "run": "wholes",
             "wholes": )" +
         wholes + "}";
}
std::string settings_of(int rank) {
  return settings_of("[" + weight_of(rank) + ", " + scale_of(rank) + "]");
}
ziggurat::Engine open(const ziggurat::Runtime& runtime, int rank) {
  return {runtime, params_of(rank), settings_of(rank)};
}
/// COUNT + W.
std::uint64_t whole(int rank, std::uint64_t w) { return params_of(rank).size() + w; }

std::vector<float> numbered(std::size_t count, float first) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = first + static_cast<float>(i);
  return values;
}
std::vector<float> found_at(const ziggurat_memory& place) {
  std::vector<float> values(place.size_bytes / sizeof(float));
  std::memcpy(values.data(), place.address, place.size_bytes);
  return values;
}
ziggurat_group sgd() {
  auto its = ZIGGURAT_INIT(ziggurat_group);
  its.learning_rate = 0.5F;
  return its;
}

TEST(CWholes, HaveTheNumbersAfterThoseOfAllParameters) {
  on_ranks(2, [](int rank, const ziggurat::Runtime& runtime) {
    ziggurat::Engine engine = open(runtime, rank);
    ziggurat::Exchange ranks(runtime, "the test");
    std::vector<float> weight = numbered(kCount, 3);
    std::vector<float> scale{7};
    engine.write_param(whole(rank, 0), ziggurat::memory_of(weight));
    engine.acquire(1);
    std::memcpy(engine.memory_of(whole(rank, 1)).address, scale.data(), sizeof(float));
    engine.param_written(whole(rank, 1));
    engine.release(1);
    ranks.barrier();

    std::vector<float> read(kCount);
    engine.read_param(whole(rank, 0), ziggurat::memory_of(read));
    EXPECT_EQ(read, weight);
    engine.acquire(0);
    engine.acquire(1);
    EXPECT_EQ(found_at(engine.memory_of(whole(rank, 0))), weight);
    const std::vector<void*> addresses = engine.addresses_of({whole(rank, 1), whole(rank, 0), 0});
    EXPECT_EQ(addresses[0], engine.memory_of(whole(rank, 1)).address);
    EXPECT_EQ(*static_cast<float*>(addresses[0]), 7.0F);
    const std::size_t first = rank == 0 ? 0 : kFirstOfRank1;
    EXPECT_EQ(addresses[2], static_cast<float*>(addresses[1]) + first) << "a slice lies in it";
    engine.release(1);
    engine.release(0);

    const std::size_t count = rank == 0 ? kFirstOfRank1 : kCount - kFirstOfRank1;
    std::vector<float> slice(count);
    engine.read_param(0, ziggurat::memory_of(slice));
    EXPECT_EQ(slice, std::vector<float>(weight.begin() + std::ptrdiff_t(first),
                                        weight.begin() + std::ptrdiff_t(first + count)));
    ranks.barrier();
  });
}

TEST(CWholes, AreTrainedSliceBySlice) {
  on_ranks(2, [](int rank, const ziggurat::Runtime& runtime) {
    ziggurat::Engine engine = open(runtime, rank);
    ziggurat::Exchange ranks(runtime, "the test");
    std::vector<float> weight = numbered(kCount, 3);
    engine.write_param(whole(rank, 0), ziggurat::memory_of(weight));
    ranks.barrier();
    std::vector<float> gradient(kCount, 2.0F);
    std::vector<float> one{1.0F};
    const std::size_t count = rank == 0 ? kFirstOfRank1 : kCount - kFirstOfRank1;
    engine.lend_gradient(0, ziggurat::memory_at(gradient.data(), count, ZIGGURAT_FP32));
    if (rank == 0) engine.lend_gradient(1, ziggurat::memory_of(one));
    engine.step({sgd()});
    std::vector<float> read(kCount);
    engine.read_param(whole(rank, 0), ziggurat::memory_of(read));
    for (std::size_t i = 0; i < kCount; ++i) ASSERT_NE(read[i], weight[i]) << i;
    EXPECT_EQ(read[0] - weight[0], read[kFirstOfRank1 + 1] - weight[kFirstOfRank1 + 1]);
    ranks.barrier();  // the other rank may still read
    std::vector<float> slice = numbered(count, -5);
    engine.write_param(0, ziggurat::memory_of(slice));
    ranks.barrier();
    engine.read_param(whole(rank, 0), ziggurat::memory_of(read));
    EXPECT_EQ(read[0], -5.0F);
    EXPECT_EQ(read[kFirstOfRank1], -5.0F);
    EXPECT_EQ(read[kFirstOfRank1 - 1], -5.0F + float(kFirstOfRank1 - 1));
    ranks.barrier();
  });
}

TEST(CWholes, RefuseCallsByName) {
  on_ranks(2, [](int rank, const ziggurat::Runtime& runtime) {
    ziggurat::Engine engine = open(runtime, rank);
    ziggurat::Exchange ranks(runtime, "the test");
    std::vector<float> values(kCount);
    const std::uint64_t beyond = whole(rank, 2);
    EXPECT_THAT(wrong([&] { engine.memory_of(whole(rank, 0)); }),
                HasSubstr("'weight'): the parameter is away: acquire its unit 0 before"));
    EXPECT_THAT(wrong([&] { engine.addresses_of({whole(rank, 1)}); }),
                HasSubstr("'scale'): the parameter is away"));
    EXPECT_THAT(wrong([&] { engine.param_written(whole(rank, 0)); }),
                HasSubstr("'weight'): the parameter is away"));
    EXPECT_THAT(wrong([&] { engine.read_param(whole(rank, 1), ziggurat::memory_of(values)); }),
                AllOf(HasSubstr("read_param(whole parameter 'scale')"),
                      HasSubstr("has 1 elements of fp32, but the memory 40001 of fp32")));
    std::vector<std::uint16_t> halves(kCount);
    EXPECT_THAT(wrong([&] {
                  engine.write_param(whole(rank, 0),
                                     ziggurat::memory_at(halves.data(), kCount, ZIGGURAT_BF16));
                }),
                AllOf(HasSubstr("write_param(whole parameter 'weight')"), HasSubstr("of bf16")));
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { engine.memory_of(beyond); }, [&] { engine.addresses_of({beyond}); },
             [&] { engine.param_written(beyond); },
             [&] { engine.read_param(beyond, ziggurat::memory_of(values)); },
             [&] { engine.write_param(beyond, ziggurat::memory_of(values)); }})
      EXPECT_THAT(wrong(call), HasSubstr(std::to_string(beyond)));
    for (const std::uint64_t param : {whole(rank, 0), beyond})
      EXPECT_THAT(wrong([&] { engine.lend_gradient(param, ziggurat::memory_of(values)); }),
                  HasSubstr(std::to_string(param)))
          << "gradients are those of slices";
    ranks.barrier();
  });
}

TEST(CWholes, AreReadFromSettingsWhoseWrongFieldsAreNamed) {
  const ziggurat::Runtime runtime(R"({"threads": 1})");
  const auto refused = [&](const std::string& wholes) {
    return wrong([&] { ziggurat::Engine(runtime, params_of(0), settings_of(wholes)); });
  };
  /// An entry in which `field` is `value`, or missing if that is empty.
  const auto with = [&](const std::string& field, const std::string& value) {
    const std::vector<std::pair<std::string, std::string>> good{
        {"name", "\"weight\""}, {"count", "40001"}, {"dtype", "\"fp32\""}, {"unit", "0"},
        {"param", "0"},         {"first", "0"},     {"trained", "true"},   {"optional", "false"}};
    std::string entry;
    for (const auto& [name, its] : good) {
      if (name == field && value.empty()) continue;
      entry += (entry.empty() ? "{\"" : ", \"") + name + "\": " + (name == field ? value : its);
    }
    return refused("[" + scale_of(0) + ", " + entry + "}]");
  };
  EXPECT_THAT(refused("7"), AllOf(HasSubstr("\"wholes\""), HasSubstr("must be a list")));
  EXPECT_THAT(refused("[7]"), HasSubstr("setting \"wholes\": entry 0 is no object"));
  EXPECT_THAT(refused(R"([{"name": "weight", "trainde": false}])"),
              HasSubstr("entry 0 has an unknown field \"trainde\""));
  for (const char* const number : {"count", "unit", "param", "first"}) {
    for (const char* const value : {"-1", "1.5", "\"1\"", "true", "99999999999999999999"}) {
      EXPECT_THAT(with(number, value),
                  AllOf(HasSubstr("entry 1 has a wrong \"" + std::string(number) + "\""),
                        HasSubstr("must be a whole number")))
          << value;
    }
  }
  for (const char* const number : {"unit", "param"})
    EXPECT_THAT(with(number, "4294967296"), HasSubstr("and in range"));
  for (const char* const missing : {"name", "count", "dtype", "unit", "first"})
    EXPECT_THAT(with(missing, ""),
                HasSubstr("a wrong \"" + std::string(missing) + "\": it is missing"));
  EXPECT_THAT(with("name", "3"), HasSubstr("a wrong \"name\": it is 3, and must be a text"));
  EXPECT_THAT(with("dtype", "\"int8\""),
              HasSubstr("a wrong \"dtype\": it is \"int8\", and must be \"fp32\", \"bf16\" or "
                        "\"fp16\""));
  EXPECT_THAT(with("dtype", "4"), HasSubstr("a wrong \"dtype\""));
  for (const char* const flag : {"trained", "optional"})
    EXPECT_THAT(with(flag, "1"), AllOf(HasSubstr("a wrong \"" + std::string(flag) + "\""),
                                       HasSubstr("must be true or false")));
}

TEST(CWholes, ThatFitNoModelAreRefusedByName) {
  const ziggurat::Runtime runtime(R"({"threads": 1})");
  const auto refused = [&](const std::string& wholes) {
    return wrong([&] { ziggurat::Engine(runtime, params_of(0), settings_of(wholes)); });
  };
  const auto weight = [](const std::string& more) {
    return R"({"name": "weight", "dtype": "fp32", "unit": 0, )" + more + "}";
  };
  EXPECT_THAT(refused("[" + weight(R"("count": 0)") + ", " + scale_of(0) + "]"),
              HasSubstr("'weight' has no elements"));
  EXPECT_THAT(
      refused("[" + weight(R"("count": 25000, "param": 5, "first": 0)") + ", " + scale_of(0) + "]"),
      HasSubstr("'weight': there is no parameter 5"));
  EXPECT_THAT(
      refused("[" + weight(R"("count": 25000, "param": 0, "first": 1)") + ", " + scale_of(0) + "]"),
      HasSubstr("'weight': parameter 'weight' is no slice of it"));
  EXPECT_THAT(refused("[" + weight(R"("count": 25000, "param": 0, "first": 0)") + "]"),
              HasSubstr("'scale'"));
  EXPECT_THAT(
      refused("[" + weight(R"("count": 25001, "param": 0, "first": 0)") + ", " + scale_of(0) + "]"),
      HasSubstr("'weight' has 25001 elements, but all ranks' slices 25000"));
  const std::string alone =
      "[" + weight(R"("count": 25000, "param": 0, "first": 0)") + ", " + scale_of(0) + "]";
  ziggurat::Engine engine(runtime, params_of(0), settings_of(alone));  // one rank has it all
  std::vector<float> values = numbered(25'000, 1);
  engine.write_param(whole(0, 0), ziggurat::memory_of(values));
  std::vector<float> read(values.size());
  engine.read_param(whole(0, 0), ziggurat::memory_of(read));
  EXPECT_EQ(read, values);
}

TEST(CWholes, OfAnotherNameOrSizeOnARankAreFoundOutByAll) {
  const auto said = [](const std::string& from, const std::string& to) {
    std::vector<std::string> words(2);
    on_ranks(2, [&](int rank, const ziggurat::Runtime& runtime) {
      std::string settings = settings_of(rank);
      if (rank == 1) settings.replace(settings.find(from), from.size(), to);
      words[static_cast<std::size_t>(rank)] =
          wrong([&] { ziggurat::Engine(runtime, params_of(rank), settings); });
    });
    return words;
  };
  const auto unlike =
      AllOf(HasSubstr("whole parameter 1"), HasSubstr("has another name, size, type or "
                                                      "unit on rank 1 than on rank 0"));
  EXPECT_THAT(said("\"scale\"", "\"scala\""), Each(unlike));
  EXPECT_THAT(said("\"count\": 1,", "\"count\": 2,"), Each(unlike));
}

// Rank 0 waits in an exchange, and rank 1 in another one: in vain, as somebody knows.
TEST(CRanksAbort, EndsTheCallsInWhichRanksWaitWithTheReason) {
  std::vector<std::string> words(2);
  on_ranks(2, [&](int rank, const ziggurat::Runtime& runtime) {
    ziggurat::Exchange first(runtime, "first");
    ziggurat::Exchange second(runtime, "second");
    first.barrier();
    std::thread knows;
    if (rank == 1) {
      knows = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        ziggurat::check(ziggurat_ranks_abort(runtime.handle(), "rank 0 is in another call"));
      });
    }
    words[static_cast<std::size_t>(rank)] =
        refusal(ZIGGURAT_UNAVAILABLE, [&] { (rank == 0 ? first : second).barrier(); });
    if (rank == 1) knows.join();
    EXPECT_THAT(refusal(ZIGGURAT_UNAVAILABLE, [&] { first.barrier(); }),
                HasSubstr("rank 0 is in another call"));
  });
  EXPECT_THAT(words, Each(HasSubstr("rank 0 is in another call")));
}

TEST(CRanksAbort, EndsAnAcquireAndAStepThatWait) {
  on_ranks(2, [](int rank, const ziggurat::Runtime& runtime) {
    ziggurat::Engine engine = open(runtime, rank);
    ziggurat::Exchange ranks(runtime, "the test");
    ranks.barrier();
    if (rank == 0) {
      EXPECT_THAT(refusal(ZIGGURAT_UNAVAILABLE, [&] { engine.step({sgd()}); }),
                  HasSubstr("nobody comes"));
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      ziggurat::check(ziggurat_ranks_abort(runtime.handle(), "nobody comes"));
    }
    EXPECT_THAT(refusal(ZIGGURAT_UNAVAILABLE, [&] { engine.acquire(0); }),
                HasSubstr("nobody comes"));
  });
}

TEST(CRanksAbort, RefusesNoReasonAndNoRuntime) {
  const ziggurat::Runtime runtime(R"({"threads": 1})");
  EXPECT_THAT(wrong([&] { ziggurat::check(ziggurat_ranks_abort(runtime.handle(), nullptr)); }),
              HasSubstr("reason is null"));
  EXPECT_THAT(wrong([] { ziggurat::check(ziggurat_ranks_abort(12345, "why")); }),
              HasSubstr("there is no runtime 12345"));
}

// A forward has them rounded, each rank's slice as the other rank decodes it; who acquires them
// aside, or reads them, has them as they are.
TEST(CWholes, ComeRoundedForAForwardAndAsTheyAreAside) {
  on_ranks(2, [](int rank, const ziggurat::Runtime& runtime) {
    std::string weight = weight_of(rank);
    weight.insert(weight.size() - 1, R"(, "quantized": true)");
    ziggurat::Engine engine(runtime, params_of(rank),
                            settings_of("[" + weight + ", " + scale_of(rank) + "]"));
    ziggurat::Exchange ranks(runtime, "the test");
    std::vector<float> values = numbered(kCount, 0.5F);
    engine.write_param(whole(rank, 0), ziggurat::memory_of(values));
    ranks.barrier();

    std::vector<float> rounded;
    for (const std::size_t first : {std::size_t{0}, kFirstOfRank1}) {  // blocks begin with slices
      const std::size_t end = first == 0 ? kFirstOfRank1 : kCount;
      std::vector<float> part(values.begin() + static_cast<std::ptrdiff_t>(first),
                              values.begin() + static_cast<std::ptrdiff_t>(end));
      std::vector<std::uint8_t> codes(2 * part.size());
      const ziggurat_memory its = ziggurat::memory_of(part);
      ziggurat::check(ziggurat_quantize(runtime.handle(), 8, &its, 1, codes.data(), 0));
      ziggurat::check(ziggurat_sum_quantized(runtime.handle(), 8, codes.data(), 1, 0, &its));
      rounded.insert(rounded.end(), part.begin(), part.end());
    }
    ASSERT_NE(rounded, values);

    engine.acquire(0);
    EXPECT_EQ(found_at(engine.memory_of(whole(rank, 0))), rounded);
    EXPECT_THAT(wrong([&] { engine.acquire_aside(0); }),
                AllOf(HasSubstr("acquire_aside(unit 0)"), HasSubstr("release it before")));
    EXPECT_THAT(wrong([&] { engine.param_written(whole(rank, 0)); }),
                HasSubstr("acquire it aside to write it"));
    engine.release(0);
    engine.acquire_aside(0);
    EXPECT_EQ(found_at(engine.memory_of(whole(rank, 0))), values);
    engine.release(0);
    EXPECT_THAT(wrong([&] { engine.acquire_aside(7); }), HasSubstr("unit 7"));
    std::vector<float> read(kCount);
    engine.read_param(whole(rank, 0), ziggurat::memory_of(read));
    EXPECT_EQ(read, values);
    engine.acquire(0);
    EXPECT_EQ(found_at(engine.memory_of(whole(rank, 0))), rounded);
    engine.release(0);
    ranks.barrier();
  });
}

}  // namespace c_wholes_test
