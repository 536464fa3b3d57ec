// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/ranks_test.cc: several ranks through libziggurat.so: they find each other by
// their settings, exchange memory, step together and hear of a rank that is gone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <numeric>
#include <thread>
#include <vector>

#include "integrations/c/ziggurat.hpp"
#include "tests/integrations/c/on_ranks.h"
#include "tests/support/free_port.h"
#include "tests/support/scratch_directory.h"

namespace ranks_test {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ziggurat::testing::on_ranks;
using ziggurat::testing::ranks_of;

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

TEST(CRanks, AreRefusedWhereTheirSettingsMakeNone) {
  const auto refused = [](const std::string& settings) {
    return refusal(ZIGGURAT_INVALID_ARGUMENT, [&] { ziggurat::Runtime{settings}; });
  };
  EXPECT_THAT(refused(R"({"rank": 0})"), HasSubstr("\"rank\" and \"world_size\""));
  EXPECT_THAT(refused(R"({"rank": 2, "world_size": 2, "rendezvous": "localhost:1"})"),
              HasSubstr("there is no rank 2 among 2 ranks: give 0 to 1"));
  EXPECT_THAT(refused(R"({"rank": 1, "world_size": 2})"),
              HasSubstr("several ranks need \"rendezvous\""));
  EXPECT_THAT(refused(R"({"rendezvous": "localhost:29400"})"), HasSubstr("give all three"));
  EXPECT_THAT(refused(R"({"rank": 1, "world_size": 2, "rendezvous": "localhost"})"),
              AllOf(HasSubstr("setting \"rendezvous\""), HasSubstr("HOST:PORT")));
  EXPECT_THAT(refused(R"({"rank": 1, "world_size": 2, "rendezvous": "203.0.113.1:9"})"),
              AllOf(HasSubstr("there is no secret"), HasSubstr("\"secret\"")));
  EXPECT_THAT(refused(R"({"world_sise": 2})"), HasSubstr("did you mean \"world_size\"?"));
}

TEST(CRanks, ThatDoNotComeAreNamed) {
  const int port = ziggurat::free_port();
  const std::string words = refusal(ZIGGURAT_DEADLINE_EXCEEDED, [&] {
    ziggurat::Runtime{ranks_of(0, 3, port, R"(, "connect_timeout_s": 0.3)")};
  });
  EXPECT_THAT(words, AllOf(HasSubstr("1"), HasSubstr("2")));
}

TEST(CRanks, AreNoneWhateverALauncherSays) {
  ::setenv("RANK", "1", 1);
  ::setenv("WORLD_SIZE", "2", 1);
  ::setenv("MASTER_ADDR", "203.0.113.1", 1);
  ::setenv("MASTER_PORT", "9", 1);
  const ziggurat::Runtime runtime(R"({"threads": 1})");
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) ::unsetenv(name);
  ziggurat::Exchange exchange(runtime, "alone");
  std::vector<double> values{1.5, -2};
  exchange.all_reduce(values);
  EXPECT_THAT(values, ElementsAre(1.5, -2));
  const std::vector<int> sent{1, 2, 3};
  std::vector<int> came(3);
  exchange.finish(exchange.begin_all_to_all(sent.data(), came.data(), 12));
  EXPECT_EQ(came, sent);
  exchange.barrier();
}

TEST(CExchange, BringsEachRankWhatTheOthersSent) {
  constexpr int kRanks = 3;
  on_ranks(kRanks, [](int rank, const ziggurat::Runtime& runtime) {
    ziggurat::Exchange exchange(runtime, "gradients");
    // Little rides on an announcement; a lot is read from the other's memory.
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{700'000}}) {
      std::vector<int> sent(kRanks * count), came(kRanks * count, -1), all(kRanks * count, -1);
      for (int to = 0; to < kRanks; ++to) {
        for (std::size_t i = 0; i < count; ++i)
          sent[static_cast<std::size_t>(to) * count + i] = 100 * rank + 10 * to + int(i % 7);
      }
      const std::uint64_t first =
          exchange.begin_all_to_all(sent.data(), came.data(), count * sizeof(int));
      const std::uint64_t second =
          exchange.begin_all_gather(sent.data(), all.data(), count * sizeof(int));
      std::vector<double> values{1.0 + rank, 0.25};
      exchange.all_reduce(values);
      EXPECT_THAT(values, ElementsAre(6.0, 0.75));
      exchange.finish(second);
      exchange.finish(first);
      for (int from = 0; from < kRanks; ++from) {
        for (std::size_t i = 0; i < count; ++i) {
          const std::size_t at = static_cast<std::size_t>(from) * count + i;
          ASSERT_EQ(came[at], 100 * from + 10 * rank + int(i % 7)) << "from " << from << ", " << i;
          ASSERT_EQ(all[at], 100 * from + int(i % 7)) << "of " << from << ", " << i;
        }
      }
    }
    exchange.barrier();
  });
}

// Each has calls of its own order.
TEST(CExchange, IsApartFromOtherExchangesAndEngines) {
  on_ranks(2, [](int rank, const ziggurat::Runtime& runtime) {
    ziggurat::Exchange first(runtime, "first");
    std::vector<float> weight(1000, 1.0F), gradient(1000, 1.0F);
    ziggurat::Engine engine(runtime, {{"weight", {1000}, ziggurat::memory_of(weight)}},
                            R"({"placement": "optimizer=host", "run": "one"})");
    ziggurat::Exchange second(runtime, "second");
    auto sgd = ZIGGURAT_INIT(ziggurat_group);
    sgd.learning_rate = 0.5F;
    constexpr int kCalls = 200;
    const auto sum_in = [&](ziggurat::Exchange& exchange, double factor) {
      for (int i = 0; i < kCalls; ++i) {
        std::vector<double> values{factor * i};
        exchange.all_reduce(values);
        EXPECT_EQ(values[0], 2 * factor * i);
      }
    };
    const auto step = [&] {
      for (int i = 0; i < 20; ++i) {
        engine.lend_gradient(0, ziggurat::memory_of(gradient));
        engine.step({sgd});
        engine.wait();
      }
    };
    // The ranks' threads come to the three in different orders.
    std::vector<std::thread> threads;
    if (rank == 0) threads.emplace_back(step);
    threads.emplace_back([&] { sum_in(first, 1); });
    threads.emplace_back([&] { sum_in(second, 3); });
    if (rank == 1) threads.emplace_back(step);
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(engine.state().generation, 20U);
    first.barrier();
  });
}

TEST(CExchange, RefusesWhatMakesNoCall) {
  const ziggurat::Runtime runtime(R"({"threads": 1})");
  const auto refused = [](const std::function<void()>& call) {
    return refusal(ZIGGURAT_INVALID_ARGUMENT, call);
  };
  std::vector<int> values(4);
  ziggurat::Exchange exchange(runtime, "mine");
  EXPECT_THAT(refused([&] { exchange.begin_all_to_all(nullptr, values.data(), 16); }),
              HasSubstr("input is null"));
  EXPECT_THAT(refused([&] { exchange.begin_all_gather(values.data(), nullptr, 16); }),
              HasSubstr("output is null"));
  EXPECT_THAT(refused([&] { exchange.finish(7); }),
              HasSubstr("exchange 'mine': call 7 is not under way"));
  const std::uint64_t ticket = exchange.begin_all_gather(values.data(), values.data(), 16);
  exchange.finish(ticket);
  EXPECT_THAT(refused([&] { exchange.finish(ticket); }), HasSubstr("finish each call once"));
  EXPECT_THAT(refused([&] { ziggurat::check(ziggurat_runtime_destroy(runtime.handle())); }),
              HasSubstr("has open engines, devices, exchanges"));
  EXPECT_THAT(refused([&] { ziggurat::check(ziggurat_exchange_close(12345)); }),
              HasSubstr("there is no exchange 12345"));
}

TEST(CExchange, OfAnotherNameOrAnotherSizeIsFoundOutByAll) {
  on_ranks(2, [](int rank, const ziggurat::Runtime& runtime) {
    const std::string words = refusal(ZIGGURAT_INVALID_ARGUMENT, [&] {
      ziggurat::Exchange(runtime, rank == 0 ? "gradients" : "parameters");
    });
    EXPECT_THAT(words, HasSubstr("opened an exchange of another name"));
    // Both have heard the other's, so nothing is lost yet.
    ziggurat::Exchange exchange(runtime, "both");
    std::vector<char> input(200), output(400);
    const std::string sizes = refusal(ZIGGURAT_INVALID_ARGUMENT, [&] {
      exchange.finish(
          exchange.begin_all_gather(input.data(), output.data(), rank == 0 ? 100 : 200));
    });
    EXPECT_THAT(sizes, AllOf(HasSubstr("exchange 'both'"), HasSubstr("ranks made different calls"),
                             HasSubstr("100"), HasSubstr("200")));
  });
}

TEST(CExchange, WhereAnotherRankOpensAnEngineIsFoundOutByAll) {
  on_ranks(2, [](int rank, const ziggurat::Runtime& runtime) {
    std::vector<float> weight(10);
    const std::string words = refusal(ZIGGURAT_INVALID_ARGUMENT, [&] {
      if (rank == 0) ziggurat::Exchange(runtime, "gradients");
      ziggurat::Engine(runtime, {{"weight", {10}, ziggurat::memory_of(weight)}},
                       R"({"placement": "optimizer=host"})");
    });
    EXPECT_THAT(words, HasSubstr("ranks made different calls"));
  });
}

// Rank 1 is a process, which is killed.
TEST(CRanks, ThatAreGoneFailTheCallsOfTheOthersByName) {
  const int port = ziggurat::free_port();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const ziggurat::Runtime runtime(ranks_of(1, 2, port));
    ziggurat::Exchange exchange(runtime, "gradients");
    exchange.barrier();
    for (;;) ::pause();
  }
  const ziggurat::Runtime runtime(ranks_of(0, 2, port));
  ziggurat::Exchange exchange(runtime, "gradients");
  exchange.barrier();
  std::vector<char> input(1000), output(2000);
  const std::uint64_t pending =
      exchange.begin_all_gather(input.data(), output.data(), input.size());
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  const std::string words = refusal(ZIGGURAT_UNAVAILABLE, [&] { exchange.finish(pending); });
  EXPECT_THAT(words, AllOf(HasSubstr("exchange 'gradients': rank 1"), HasSubstr("all_gather")));
  EXPECT_THAT(refusal(ZIGGURAT_UNAVAILABLE, [&] { exchange.barrier(); }),
              AllOf(HasSubstr("rank 1"), HasSubstr("barrier")));
}

TEST(CRanks, ThatCloseFailTheCallsOfTheOthersByName) {
  on_ranks(2, [](int rank, const ziggurat::Runtime& runtime) {
    ziggurat::Exchange exchange(runtime, "gradients");
    exchange.barrier();
    if (rank == 1) return;  // and destroys its runtime
    std::vector<char> input(1000), output(2000);
    const std::string words = refusal(ZIGGURAT_UNAVAILABLE, [&] {
      exchange.finish(exchange.begin_all_gather(input.data(), output.data(), input.size()));
    });
    EXPECT_THAT(words, AllOf(HasSubstr("rank 1 has left"), HasSubstr("all_gather")));
  });
}

/// What ranks train: a parameter that rank 0 has, one that both have a part of.
struct Pieces {
  std::vector<float> whole = std::vector<float>(300, 1.0F);
  std::vector<float> part;
  std::vector<float> gradient = std::vector<float>(300, 0.5F);

  explicit Pieces(int rank) : part(rank == 0 ? 100 : 37, 2.0F) {}
  std::vector<ziggurat::Param> params(int rank) {
    std::vector<ziggurat::Param> all{
        {"part", {static_cast<std::int64_t>(part.size())}, ziggurat::memory_of(part)}};
    if (rank == 0) all.push_back({"whole", {300}, ziggurat::memory_of(whole)});
    return all;
  }
  void lend(ziggurat::Engine& engine, int rank) {
    engine.lend_gradient(0, ziggurat::memory_at(gradient.data(), part.size(), ZIGGURAT_FP32));
    if (rank == 0) engine.lend_gradient(1, ziggurat::memory_of(gradient));
  }
};

TEST(CRanks, StepTogetherAndResumeTogether) {
  const ziggurat::testing::ScratchDirectory directory;
  auto sgd = ZIGGURAT_INIT(ziggurat_group);
  sgd.learning_rate = 1.0F;
  const auto settings = [&](const std::string& run) {
    return R"({"store": ")" + directory.path() + R"(/store", "optimizer": "sgd", "run": ")" + run +
           "\"}";
  };
  on_ranks(2, [&](int rank, const ziggurat::Runtime& runtime) {
    Pieces pieces(rank);
    ziggurat::Engine engine(runtime, pieces.params(rank), settings("model=a"));
    pieces.lend(engine, rank);
    engine.step({sgd});
    engine.wait();
    EXPECT_EQ(pieces.part[5], 1.5F);
    // Rank 1 refuses the next: none makes it, and the gradients are still lent.
    pieces.lend(engine, rank);
    auto wrong = sgd;
    if (rank == 1) wrong.learning_rate = std::numeric_limits<float>::infinity();
    const std::string words = refusal(ZIGGURAT_INVALID_ARGUMENT, [&] { engine.step({wrong}); });
    EXPECT_THAT(words, AllOf(HasSubstr("step 2"),
                             HasSubstr("no step can be made with the settings of 'part'")));
    EXPECT_THAT(words, HasSubstr(rank == 0 ? "rank 1 refused the step" : "learning rate inf"));
    EXPECT_THAT(refusal(ZIGGURAT_INVALID_ARGUMENT,
                        [&] {
                          engine.step(rank == 1 ? std::vector{sgd, sgd} : std::vector{sgd});
                        }),
                HasSubstr("2 groups were given, but the parameters use 1"));
    EXPECT_THAT(refusal(ZIGGURAT_INVALID_ARGUMENT,
                        [&] { engine.step({sgd}, 1, "", rank == 1 ? 1U << 30U : 0); }),
                HasSubstr("options.flags"));
    engine.step({sgd});
    engine.make_durable();
    EXPECT_EQ(pieces.part[5], 1.0F);
    EXPECT_EQ(engine.state().durable_generation, 2U);
  });
  on_ranks(2, [&](int rank, const ziggurat::Runtime& runtime) {
    Pieces pieces(rank);
    const ziggurat::Engine engine(runtime, pieces.params(rank), settings("model=a"));
    EXPECT_EQ(engine.state().generation, 2U);
    EXPECT_EQ(engine.steps_of(0), 2U);
    EXPECT_EQ(pieces.part[5], 1.0F);
  });
  on_ranks(2, [&](int rank, const ziggurat::Runtime& runtime) {
    Pieces pieces(rank);
    const std::string words = refusal(ZIGGURAT_INVALID_ARGUMENT, [&] {
      ziggurat::Engine(runtime, pieces.params(rank), settings("model=b"));
    });
    EXPECT_THAT(words, HasSubstr("the store has model=a, but this run has model=b"));
  });
}

TEST(CRanks, ReadTheStateOfEachOther) {
  on_ranks(2, [&](int rank, const ziggurat::Runtime& runtime) {
    Pieces pieces(rank);
    ziggurat::Engine engine(runtime, pieces.params(rank),
                            R"({"placement": "optimizer=host", "optimizer": "sgd"})");
    ziggurat::Exchange exchange(runtime, "meet");
    auto sgd = ZIGGURAT_INIT(ziggurat_group);
    sgd.learning_rate = 1.0F;
    pieces.lend(engine, rank);
    engine.step({sgd});
    EXPECT_EQ(engine.pieces_of(0), "100\tpart\n300\twhole\n");
    EXPECT_EQ(engine.pieces_of(1), "37\tpart\n");
    if (rank == 1) {
      std::vector<float> whole(300);
      engine.read_state_of(0, "whole", "master", ziggurat::memory_of(whole));
      EXPECT_EQ(whole, std::vector<float>(300, 0.5F));
      const std::string words = refusal(ZIGGURAT_INVALID_ARGUMENT, [&] {
        engine.read_state_of(0, "half", "master", ziggurat::memory_of(whole));
      });
      EXPECT_THAT(words, HasSubstr("read_state_of(rank 0, 'half')"));
    }
    exchange.barrier();
  });
}

// The other rank calls nothing for it.
TEST(CRanks, SaveAloneWhatAllHave) {
  const ziggurat::testing::ScratchDirectory directory;
  on_ranks(2, [&](int rank, const ziggurat::Runtime& runtime) {
    Pieces pieces(rank);
    ziggurat::Engine engine(runtime, pieces.params(rank),
                            R"({"placement": "optimizer=host", "optimizer": "sgd"})");
    ziggurat::Exchange exchange(runtime, "meet");
    auto sgd = ZIGGURAT_INIT(ziggurat_group);
    sgd.learning_rate = 1.0F;
    pieces.lend(engine, rank);
    engine.step({sgd});
    const auto save = [&](const std::string& name, const std::string& other) {
      const ziggurat_engine handle = engine.handle();
      auto options = ZIGGURAT_INIT(ziggurat_save_options);
      options.engine_count = 1;
      options.engines = &handle;
      const std::string content =
          R"({"folder": ")" + directory.path() + "/" + name +
          R"(", "step": 1, "keep_last": 0, "keep_every": 0, "model": "m", "dtype": "fp32",
              "placement": "host", "resume": {}, "values": [], "alone": true,
              "params": [{"name": "part", "shape": [137], "trained": true},
                         {"name": "whole", "shape": [300], "trained": true}],
              "engines": [[{"param": 0, "first": 0}, {"param": 1, "first": 0}]],
              "others": [)" +
          other + "]}";
      ziggurat::check(ziggurat_save_checkpoint(runtime.handle(), &options, content.c_str()));
    };
    const std::string rest = R"("name": "part", "param": 0, "first": 100, "count": 37})";
    if (rank == 0) {
      const std::string path = directory.path() + "/saved";
      save("saved", R"({"engine": 0, "rank": 1, )" + rest);
      ziggurat_checkpoint checkpoint = 0;
      ziggurat::check(ziggurat_checkpoint_open(runtime.handle(), path.c_str(), &checkpoint));
      std::vector<float> expected(100), part(37), read(137);
      engine.read_state_of(0, "part", "master", ziggurat::memory_of(expected));
      engine.read_state_of(1, "part", "master", ziggurat::memory_of(part));
      expected.insert(expected.end(), part.begin(), part.end());
      const ziggurat_memory memory = ziggurat::memory_of(read);
      ziggurat::check(ziggurat_checkpoint_read(checkpoint, 0, 0, &memory));
      EXPECT_EQ(read, expected);
      ziggurat::check(ziggurat_checkpoint_close(checkpoint));

      const auto refused = [&](const std::string& other) {
        return refusal(ZIGGURAT_INVALID_ARGUMENT, [&] { save("refused", other); });
      };
      EXPECT_THAT(refused(R"({"engine": 1, "rank": 1, )" + rest), HasSubstr("names engine 1"));
      EXPECT_THAT(refused(""), HasSubstr("have only 100 of its 137 elements"));
      EXPECT_THAT(refused(R"({"engine": 0, "rank": 1, "name": "none", "param": 0, "first": 100,
                              "count": 37})"),
                  HasSubstr("read_state_of(rank 1, 'none')"));
      EXPECT_FALSE(std::filesystem::exists(directory.path() + "/refused/step-000000001"));
    }
    exchange.barrier();
  });
}

}  // namespace ranks_test
