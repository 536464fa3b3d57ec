// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_wholes_end_test.cc: ranks that bring whole units of slices, when one closes its
// engine, fails, has a slow drive, or has another model; and what each rank is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cerrno>
#include <chrono>
#include <random>
#include <thread>

#include "aio/faulty_engine.h"
#include "tests/core/wholes_world.h"
#include "tests/support/faults_under.h"

namespace ziggurat::testing {
namespace lent_wholes_end_test {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

class LentWholesEnd : public ::testing::TestWithParam<Tier> {
 protected:
  /// Each rank opens its engine, and does `body`; it closes its engine when it likes.
  void on_ranks(WholesWorld& world, const std::function<void(WholesRank& rank)>& body) {
    expect_none(run_ranks(world.size(), [&](int rank) {
      world.open(rank);
      WholesRank& its = *world.ranks[static_cast<std::size_t>(rank)];
      body(its);
      its.close();
    }));
  }
  /// Makes the order known in which units are used. No rank has a part in anything more.
  static void learn(WholesRank& rank) {
    for (int step = 0; step < 2; ++step) {
      rank.look_at_all();
      rank.step();
    }
    rest(rank);
  }
  static void rest(WholesRank& rank) {
    if (GetParam() == Tier::kNvme) rank.engine->make_durable();
  }
  static void plan(Runtime& runtime, FaultyEngine*& drive, Fault fault) {
    runtime.reactor.block_on([](FaultyEngine& its, Fault planned) -> Task<> {
      its.plan(planned.at(its.calls(planned.point)).from_then_on());
      co_return;
    }(*drive, fault));
  }
};

INSTANTIATE_TEST_SUITE_P(Tiers, LentWholesEnd, ::testing::Values(Tier::kHost, Tier::kNvme),
                         [](const auto& one) { return std::string(to_string(one.param)); });

TEST_P(LentWholesEnd, OfARankIsSaidToWhoAcquires) {
  for (const StreamedUnit unit : {0U, 2U}) {
    WholesWorld world(2, GetParam());
    world.connect();
    std::barrier<> both(2);
    on_ranks(world, [&](WholesRank& rank) {
      both.arrive_and_wait();
      if (rank.number == 1) rank.close();
      both.arrive_and_wait();
      if (rank.number == 1) return;
      const Error error = thrown_by([&] { rank.engine->acquire(unit, rank.host); });
      EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
      EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 1 has closed its engine"),
                                      HasSubstr(fmt::format("has a part of unit {} ('{}", unit,
                                                            unit == 0 ? "scale" : "frozen.bias"))));
    });
  }
}

// What is brought ahead may never be needed, so it fails nobody.
TEST_P(LentWholesEnd, OfARankLeavesWhoOnlyBringsAhead) {
  for (int round = 0; round < 10; ++round) {
    WholesWorld world(2, GetParam(), kTight);
    world.connect();
    std::barrier<> both(2);
    on_ranks(world, [&](WholesRank& rank) {
      learn(rank);
      if (rank.number == 1) {
        if (round % 2 == 1) std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
        rank.close();
        both.arrive_and_wait();
        both.arrive_and_wait();
        return;
      }
      rank.engine->expect_units(std::vector<StreamedUnit>{4, 3, 2, 1, 0});
      both.arrive_and_wait();
      std::this_thread::sleep_for(2ms);
      EXPECT_NO_THROW(rank.engine->wait_all_updated());
      EXPECT_NO_THROW(rank.engine->check());
      EXPECT_FALSE(rank.engine->has_ended());
      both.arrive_and_wait();
    });
  }
}

TEST_P(LentWholesEnd, OfAllRanksAtOnceWaitsForNobody) {
  for (int round = 0; round < 10; ++round) {
    WholesWorld world(3, GetParam(), round % 2 == 0 ? kRoomy : kTight);
    world.connect();
    on_ranks(world, [&](WholesRank& rank) {
      learn(rank);
      rank.engine->expect_units(std::vector<StreamedUnit>{4, 3, 2, 1, 0});
    });
  }
}

// Each acquire of the others finds what is right, or the name of the rank.
TEST_P(LentWholesEnd, OfARankAtAnyTimeIsSaidToWhoAcquires) {
  for (unsigned seed = 1; seed <= 8; ++seed) {
    WholesWorld world(3, GetParam(), seed % 2 == 0 ? kRoomy : kTight);
    world.connect();
    std::atomic<bool> closing = false;
    on_ranks(world, [&](WholesRank& rank) {
      std::minstd_rand random(seed * 16 + static_cast<unsigned>(rank.number));
      rank.step();
      rest(rank);
      if (rank.number == 1) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 4000));
        closing = true;
        return;
      }
      // In a roomy device all may be there before rank 1 closes.
      for (int after = 0; after < 100; after += closing ? 1 : 0) {
        try {
          rank.look(random() % kWholeUnits);
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
          EXPECT_THAT(error.what(), HasSubstr("rank 1 has closed its engine"));
          return;
        }
      }
    });
  }
}

TEST_P(LentWholesEnd, OfARanksProcessIsSaidToWhoAcquires) {
  WholesWorld world(2, GetParam());
  world.connect();
  std::barrier<> both(2);
  on_ranks(world, [&](WholesRank& rank) {
    rank.step();
    both.arrive_and_wait();
    if (rank.number == 1) {
      rank.runtime->reactor.block_on([](Runtime& its) -> Task<> {
        its.ranks->abort("as if rank 1 had died");
        co_return;
      }(*rank.runtime));
    }
    both.arrive_and_wait();
    if (rank.number == 1) return;
    const Error error = thrown_by([&] { rank.engine->acquire(1, rank.host); });
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
    EXPECT_THAT(error.what(), HasSubstr("as if rank 1 had died"));
  });
}

class LentWholesDrive : public LentWholesEnd {
 protected:
  LentWholesDrive() {
    world_.connect();
    put_faults_under(*world_.runtimes[1], drive_);
  }

  WholesWorld world_{2, Tier::kNvme};
  FaultyEngine* drive_ = nullptr;  // rank 1's, once it is opened
};

INSTANTIATE_TEST_SUITE_P(Tiers, LentWholesDrive, ::testing::Values(Tier::kNvme),
                         [](const auto& one) { return std::string(to_string(one.param)); });

TEST_P(LentWholesDrive, ThatFailsIsSaidToWhoAcquiresByTheRanksName) {
  std::barrier<> both(2);
  on_ranks(world_, [&](WholesRank& rank) {
    rank.step();
    rank.engine->make_durable();
    both.arrive_and_wait();
    if (rank.number == 1) plan(*rank.runtime, drive_, Fault::fail(FaultPoint::kRead, EIO));
    both.arrive_and_wait();
    if (rank.number == 0) {
      const Error error = thrown_by([&] { rank.engine->acquire(1, rank.host); });
      EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 1: "), HasSubstr("EIO")));
    }
    both.arrive_and_wait();
  });
}

TEST_P(LentWholesDrive, ThatFailsInAStepEndsTheOthersByTheRanksName) {
  std::barrier<> both(2);
  on_ranks(world_, [&](WholesRank& rank) {
    rank.step();
    rank.engine->make_durable();
    both.arrive_and_wait();
    if (rank.number == 1) plan(*rank.runtime, drive_, Fault::fail(FaultPoint::kWrite, EIO));
    both.arrive_and_wait();
    const Error error = thrown_by([&] {
      for (int step = 0; step < 3; ++step) {
        rank.step();
        rank.look_at_all();
      }
    });
    EXPECT_THAT(error.what(), HasSubstr("EIO"));
    if (rank.number == 0) {
      EXPECT_THAT(error.what(), HasSubstr("rank 1"));
    }
    both.arrive_and_wait();
  });
}

// Rank 0 is done with its part of a step long before.
TEST_P(LentWholesDrive, ThatIsSlowIsWaitedFor) {
  std::barrier<> both(2);
  on_ranks(world_, [&](WholesRank& rank) {
    rank.step();
    both.arrive_and_wait();
    if (rank.number == 1) plan(*rank.runtime, drive_, Fault::slow(FaultPoint::kWrite, 5ms));
    both.arrive_and_wait();
    for (int step = 0; step < 3; ++step) {
      rank.step();
      rank.look_at_all();
    }
    both.arrive_and_wait();
  });
}

// What rank 0 brings ahead is not there yet when the ranks make the next step.
TEST_P(LentWholesDrive, ThatReadsSlowlyHoldsUpNoStepWithWhatIsBroughtAhead) {
  std::barrier<> both(2);
  on_ranks(world_, [&](WholesRank& rank) {
    rank.step();
    both.arrive_and_wait();
    if (rank.number == 1) plan(*rank.runtime, drive_, Fault::slow(FaultPoint::kRead, 3ms));
    both.arrive_and_wait();
    for (int step = 0; step < 4; ++step) {
      rank.engine->expect_units(std::vector<StreamedUnit>{0, 1, 2, 3, 4});
      rank.step();
      rank.look(static_cast<StreamedUnit>(step));
    }
    rank.look_at_all();
    both.arrive_and_wait();
  });
}

/// Two ranks, and the words of what they refuse.
class LentWholesRefusals : public ::testing::Test {
 protected:
  template <class Call>
  static std::string refusal(const Call& call) {
    const Error error = thrown_by(call);
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
    return error.what();
  }
  /// What both ranks say that open engines; `change` makes one of them another than it should be.
  std::vector<std::string> opening(
      const std::function<void(int rank, EngineConfig& config, ModelSpec& model)>& change,
      Tier params = Tier::kHost) {
    WholesWorld world(2, params);
    world.change = change;
    world.connect();
    std::vector<std::string> words(2);
    std::barrier<> both(2);
    expect_none(run_ranks(2, [&](int rank) {
      words[static_cast<std::size_t>(rank)] = thrown_by([&] { world.open(rank); }).what();
      both.arrive_and_wait();
      world.ranks[static_cast<std::size_t>(rank)]->close();
    }));
    return words;
  }
  /// Both say `what` and `of`.
  void expect_refused(const std::function<void(WholeParam& whole)>& change, std::size_t w,
                      const char* what) {
    const std::vector<std::string> words = opening([&](int rank, EngineConfig& config, ModelSpec&) {
      if (rank == 1) change(config.wholes[w]);
    });
    EXPECT_THAT(words, ::testing::Each(HasSubstr(what)));
  }
};

TEST_F(LentWholesRefusals, ChangeNothing) {
  WholesWorld world(2, Tier::kHost);
  std::barrier<> both(2);
  expect_none(world.run([&](WholesRank& rank) {
    LentEngine& engine = *rank.engine;
    const auto count = static_cast<ParamId>(rank.own.size() + kWholes.size());
    EXPECT_THAT(refusal([&] { engine.place(rank.whole(4)); }),
                HasSubstr("('large'): the parameter is away: acquire its unit 1 before"));
    EXPECT_THAT(refusal([&] { engine.store_param(rank.whole(3), rank.host); }),
                HasSubstr("'weight'): the parameter is away"));
    EXPECT_THAT(refusal([&] { engine.place(count); }), HasSubstr("(parameter "));
    EXPECT_THAT(refusal([&] { engine.acquire(kWholeUnits, rank.host); }),
                HasSubstr("has only units 0 to 4"));
    const ParamId large = *rank.own_of(4);
    TypedArray values(DType::kFloat32, rank.cuts[4].count);
    engine.acquire(1, rank.host);
    EXPECT_THAT(refusal([&] { engine.read_home(large, values.span()); }),
                HasSubstr("'large'): its unit 1 is acquired: release it before"));
    EXPECT_THAT(refusal([&] { engine.write_home(large, values.span()); }),
                HasSubstr("its unit 1 is acquired"));
    engine.release(1, rank.host);
    EXPECT_THAT(refusal([&] { engine.read_home(large, values.span().subspan(0, 5)); }),
                HasSubstr("'large'"));
    TypedArray halves(DType::kBFloat16, rank.cuts[4].count);
    EXPECT_THAT(refusal([&] { engine.write_home(large, halves.span()); }),
                HasSubstr("is fp32, but the memory is bf16"));
    both.arrive_and_wait();
    rank.look_at_all();
    rank.step();
    rank.look_at_all();
  }));
}

TEST_F(LentWholesRefusals, OfAStepNameTheRankThatHasAUnit) {
  WholesWorld world(2, Tier::kHost);
  std::barrier<> both(2);
  expect_none(world.run([&](WholesRank& rank) {
    if (rank.number == 1) rank.engine->acquire(3, rank.host);
    const std::string words = refusal([&] { rank.step(); });
    EXPECT_THAT(words, HasSubstr("unit 3 is acquired"));
    if (rank.number == 0) {
      EXPECT_THAT(words, HasSubstr("rank 1"));
    }
    if (rank.number == 1) rank.engine->release(3, rank.host);
    rank.step();
    rank.look_at_all();
  }));
}

TEST_F(LentWholesRefusals, NameAWholeThatRanksDoNotHaveAlike) {
  const auto of_rank_0 = [&](const std::function<void(WholeParam & whole)>& change) {
    // Rank 1 has no slice of it, so nothing else is wrong.
    const std::vector<std::string> words = opening([&](int rank, EngineConfig& config, ModelSpec&) {
      if (rank == 1) change(config.wholes[0]);
    });
    EXPECT_THAT(words[0], HasSubstr("whole parameter 0 ('scale' here) has another name, size, "
                                    "type or unit on rank 1 than on rank 0"));
    EXPECT_THAT(words[1], HasSubstr("has another name, size, type or unit on rank 1"));
  };
  of_rank_0([](WholeParam& its) { its.name = "other"; });
  of_rank_0([](WholeParam& its) { its.count = 2; });
  of_rank_0([](WholeParam& its) { its.dtype = DType::kBFloat16; });
  of_rank_0([](WholeParam& its) { its.unit = 1; });
  of_rank_0([](WholeParam& its) { its.trained = false; });
  of_rank_0([](WholeParam& its) { its.quantized = true; });
  const std::vector<std::string> words = opening([](int rank, EngineConfig& config, ModelSpec&) {
    if (rank == 1) config.wholes.erase(config.wholes.begin());
  });
  EXPECT_THAT(words, ::testing::Each(HasSubstr("ranks have 11 to 12 whole parameters")));
}

TEST_F(LentWholesRefusals, NameAWholeOfWhichRanksHaveTooMuchOrTooLittle) {
  expect_refused(
      [](WholeParam& its) { its.first -= 1; }, 4,
      "'large' of 200003 elements: rank 1 has those from 100001 on, but the ranks before it "
      "end at 100002");
  const std::vector<std::string> words = opening([](int, EngineConfig& config, ModelSpec&) {
    for (WholeParam& its : config.wholes)
      if (its.name == "norm") its.count += 1;
  });
  EXPECT_THAT(words,
              ::testing::Each(HasSubstr("'norm' has 1000 elements, but all ranks' slices 999")));
}

TEST_F(LentWholesRefusals, NameASliceThatIsNone) {
  const char* const none =
      "is no slice of it: give it the same unit and type, and elements that "
      "the whole has";
  expect_refused([](WholeParam& its) { its.first = its.count; }, 3, none);
  expect_refused([](WholeParam& its) { its.own = 3; }, 3, none);
  expect_refused([](WholeParam& its) { its.own = 99; }, 3, "'weight': there is no parameter 99");
  expect_refused([](WholeParam& its) { its.own = std::nullopt; }, 3,
                 "streamed parameter 'weight' is no whole parameter's slice");
  const std::vector<std::string> words = opening([](int, EngineConfig& config, ModelSpec&) {
    config.wholes.push_back(config.wholes[1]);
    config.wholes.back().name = "twice";
  });
  EXPECT_THAT(words, ::testing::Each(HasSubstr(
                         "parameter 'bias' is a slice of whole parameter 'bias' and of 'twice'")));
}

TEST_F(LentWholesRefusals, KeepSlicesOffTheDevice) {
  const std::vector<std::string> words = opening(
      [](int, EngineConfig& config, ModelSpec&) { config.placement.params = Tier::kDevice; });
  EXPECT_THAT(words,
              ::testing::Each(HasSubstr("`placement=params=device` cannot be used with whole")));
}

}  // namespace lent_wholes_end_test
}  // namespace ziggurat::testing
