// SPDX-License-Identifier: Apache-2.0
// tests/core/unit_service_test.cc: ranks give each other their slices of units, in virtual time:
// whoever asks when, in the generation that was asked for or not at all, and to the end of an
// engine.
#include "core/engine/lent/unit_service.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "collectives/simulated/simulated_communicator.h"

namespace ziggurat::testing {
namespace unit_service_test {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using enum UnitService::Came;

constexpr StreamedUnit kUnits = 4;

Task<> pause(Reactor& reactor, Nanoseconds time) {
  Signal over(reactor);
  reactor.clock().after(time, [&over] { over.set(); });
  co_await over.wait();
}

/// A rank that serves units, of which unit u has u + 1 messages.
class Rank {
  Reactor& reactor_;
  int rank_;
  std::minstd_rand random_{static_cast<unsigned>(rank_ + 1)};

 public:
  Rank(Reactor& reactor, Communicator& ranks)
      : reactor_(reactor),
        rank_(ranks.rank()),
        service(cancel, reactor, ranks,
                {.slices = [this](const UnitService::Asked& asked,
                                  const UnitService::Give& give) { return slices(asked, give); },
                 .spawn = [this](Task<> task) { tasks.spawn(std::move(task)); }}) {}

  /// What message `m` of `unit` has at this rank's generation.
  static std::vector<std::uint64_t> message(int rank, StreamedUnit unit, std::size_t m,
                                            std::uint64_t generation) {
    std::vector<std::uint64_t> values(10 + 100 * m);
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = i + 1000 * m + 10'000 * unit + 100'000 * static_cast<std::uint64_t>(rank) +
                  1'000'000 * generation;
    return values;
  }
  /// Asks for `unit`; whatever comes whole has the right values.
  Task<UnitService::Came> bring(int from, StreamedUnit unit) {
    return bring_at(from, unit, generation);
  }
  Task<UnitService::Came> bring_at(int from, StreamedUnit unit, std::uint64_t asked) {
    std::vector<std::vector<std::uint64_t>> came(unit + 1);
    std::vector<std::uint64_t> room(10 + 100 * unit);  // of all messages
    std::vector<std::span<std::byte>> into;
    for (std::size_t m = 0; m < came.size(); ++m)
      into.push_back(std::as_writable_bytes(std::span(room).first(10 + 100 * m)));
    const UnitService::Landed landed = [&](std::size_t m) -> Task<> {
      co_await pause(reactor_, std::chrono::microseconds(1));
      came[m].assign(room.begin(), room.begin() + static_cast<std::ptrdiff_t>(10 + 100 * m));
    };
    const UnitService::Asked what{
        .of = from, .unit = unit, .generation = asked, .form = WholeForm::kQuantized};
    const UnitService::Came how = co_await service.bring(from, what, into, landed);
    for (std::size_t m = 0; m < came.size() && how == kWhole; ++m)
      EXPECT_EQ(came[m], message(from, unit, m, asked)) << "unit " << unit << " of " << from;
    co_return how;
  }
  void begin(std::uint64_t its) {
    generation = its;
    service.begin_generation(its);
  }

  CancelScope cancel{reactor_};
  WorkGroup tasks{reactor_};
  std::uint64_t generation = 0;
  std::uint64_t seed = 0;                  ///< of how long slices take, if it is not 0
  std::optional<std::size_t> fails_after;  ///< messages of each unit
  std::size_t served = 0;                  ///< messages
  UnitService service;

 private:
  Task<UnitService::Came> slices(UnitService::Asked asked, const UnitService::Give& give) {
    EXPECT_EQ(asked.of, rank_);
    EXPECT_EQ(asked.form, WholeForm::kQuantized);
    for (std::size_t m = 0; m <= asked.unit; ++m) {
      if (seed != 0) co_await pause(reactor_, std::chrono::microseconds(random_() % seed));
      if (fails_after == m) throw Error(ErrorCode::kDataLoss, "the record is damaged");
      const std::vector<std::uint64_t> values = message(rank_, asked.unit, m, generation);
      co_await give(std::as_bytes(std::span(values)));
      ++served;
    }
    co_return kWhole;
  }
};

class UnitServices : public ::testing::Test {
 protected:
  using OnRank = std::function<Task<>(Rank& rank, int number)>;

  void connect(int size) {
    ranks_.clear();
    communicators_ = SimulatedCommunicator::create(
        reactor_,
        {.ranks = size, .ranks_per_node = size, .within_node = {1e9, 10us}, .between_nodes = {}});
    for (const auto& its : communicators_) ranks_.push_back(std::make_unique<Rank>(reactor_, *its));
  }
  void begin_all(std::uint64_t generation) {
    for (const auto& rank : ranks_) rank->begin(generation);
  }
  /// All ranks do `body`. Whatever hangs fails, because nothing else is under way.
  void all(const OnRank& body) {
    const auto together = [&]() -> Task<> {
      WorkGroup group(reactor_);
      for (std::size_t r = 0; r < ranks_.size(); ++r)
        group.spawn(body(*ranks_[r], static_cast<int>(r)));
      co_await group.wait_idle();
    };
    reactor_.block_on(together());
  }
  void on(int rank, const std::function<Task<>(Rank& rank)>& body) {
    reactor_.block_on(body(*ranks_[static_cast<std::size_t>(rank)]));
  }
  void close_all() {
    all([](Rank& rank, int) -> Task<> {
      co_await rank.service.close();
      co_await rank.tasks.wait_idle();
    });
  }

  Reactor reactor_{Clock::Kind::kVirtual};
  std::vector<std::unique_ptr<Communicator>> communicators_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

TEST_F(UnitServices, GiveEachRankWhatItAsksForWhileTheOthersDoNothing) {
  connect(3);
  begin_all(7);
  on(1, [](Rank& rank) -> Task<> {
    for (StreamedUnit u = 0; u < kUnits; ++u) {
      EXPECT_EQ(co_await rank.bring(0, u), kWhole);
      EXPECT_EQ(co_await rank.bring(2, u), kWhole);
    }
  });
  close_all();
}

TEST_F(UnitServices, AnswerManyRequestsAtOnce) {
  connect(3);
  begin_all(1);
  for (const auto& rank : ranks_) rank->seed = 50;
  all([&](Rank& rank, int number) -> Task<> {
    WorkGroup brings(reactor_);
    const auto bring = [](Rank& its, int from, StreamedUnit unit) -> Task<> {
      EXPECT_EQ(co_await its.bring(from, unit), kWhole);
    };
    for (int round = 0; round < 5; ++round) {
      for (StreamedUnit u = 0; u < kUnits; ++u) {
        for (int from = 0; from < 3; ++from)
          if (from != number)
            brings.spawn(bring(rank, from, (u + static_cast<StreamedUnit>(number)) % kUnits));
      }
    }
    co_await brings.wait_idle();
  });
  close_all();
}

// A rank is through its opening, or its step, before another one is.
TEST_F(UnitServices, WaitForARankThatComesToTheGenerationLater) {
  connect(2);
  for (const std::uint64_t generation : {0U, 1U, 5U}) {
    ranks_[0]->begin(generation);
    const Nanoseconds before = reactor_.clock().now();
    all([&](Rank& rank, int number) -> Task<> {
      if (number == 0) {
        EXPECT_EQ(co_await rank.bring(1, 2), kWhole);
        EXPECT_GE(reactor_.clock().now() - before, 20ms);
      } else {
        co_await pause(reactor_, 20ms);
        rank.begin(generation);
      }
    });
  }
  close_all();
}

TEST_F(UnitServices, SayThatAGenerationIsOverWhileParametersChangeAndAfter) {
  connect(2);
  begin_all(3);
  on(1, [](Rank& rank) { return rank.service.begin_changes(); });
  on(0, [](Rank& rank) -> Task<> { EXPECT_EQ(co_await rank.bring(1, 2), kStale); });
  EXPECT_EQ(ranks_[1]->served, 0U);
  ranks_[1]->begin(4);
  on(0, [](Rank& rank) -> Task<> { EXPECT_EQ(co_await rank.bring(1, 2), kStale); });
  ranks_[0]->begin(4);
  on(0, [](Rank& rank) -> Task<> { EXPECT_EQ(co_await rank.bring(1, 2), kWhole); });
  close_all();
}

// Rank 0 asks for generation 4 while rank 1 makes it.
TEST_F(UnitServices, WaitForParametersThatChange) {
  connect(2);
  begin_all(3);
  on(1, [](Rank& rank) { return rank.service.begin_changes(); });
  all([&](Rank& rank, int number) -> Task<> {
    if (number == 0) {
      rank.begin(4);
      EXPECT_EQ(co_await rank.bring(1, 3), kWhole);
      EXPECT_EQ(ranks_[1]->generation, 4U);
    } else {
      co_await pause(reactor_, 5ms);
      rank.begin(4);
    }
  });
  close_all();
}

TEST_F(UnitServices, ChangeNothingWhileItIsBeingGiven) {
  connect(3);
  begin_all(1);
  ranks_[1]->seed = 2000;
  all([&](Rank& rank, int number) -> Task<> {
    if (number != 1) {
      EXPECT_EQ(co_await rank.bring(1, 3), kWhole);
      co_return;
    }
    co_await pause(reactor_, 100us);
    EXPECT_LT(rank.served, 8U);
    co_await rank.service.begin_changes();
    EXPECT_EQ(rank.served, 8U);
    rank.begin(2);
  });
  close_all();
}

TEST_F(UnitServices, NameTheRankThatCannotReadASlice) {
  connect(2);
  begin_all(1);
  for (const std::size_t after : {0U, 2U}) {
    ranks_[1]->fails_after = after;
    on(0, [&](Rank& rank) -> Task<> {
      std::optional<Error> refused;
      try {
        co_await rank.bring(1, 3);
      } catch (const Error& error) {
        refused = error;
      }
      EXPECT_TRUE(refused && refused->code() == ErrorCode::kDataLoss);
      EXPECT_THAT(refused ? refused->what() : "", HasSubstr("rank 1: the record is damaged"));
    });
    ranks_[1]->fails_after.reset();
    on(0, [](Rank& rank) -> Task<> { EXPECT_EQ(co_await rank.bring(1, 3), kWhole); });
  }
  EXPECT_FALSE(ranks_[1]->tasks.failed());
  close_all();
}

TEST_F(UnitServices, SayThatARankHasClosedForEverAfter) {
  connect(3);
  begin_all(1);
  on(1, [](Rank& rank) -> Task<> {
    co_await rank.service.close();
    co_await rank.tasks.wait_idle();
  });
  ranks_[1].reset();  // nobody needs it any more
  for (int i = 0; i < 2; ++i) {
    on(0, [](Rank& rank) -> Task<> {
      EXPECT_EQ(co_await rank.bring(1, 2), kClosed);
      EXPECT_EQ(co_await rank.bring(2, 2), kWhole);
    });
  }
  on(0, [](Rank& rank) { return rank.service.close(); });
  on(2, [](Rank& rank) -> Task<> {
    EXPECT_EQ(co_await rank.bring(0, 2), kClosed);
    EXPECT_EQ(co_await rank.bring(1, 2), kClosed);
    co_await rank.service.close();
  });
}

// Such as those that wait for a step that a rank does not make.
TEST_F(UnitServices, AnswerAllThatWasAskedBeforeTheyClose) {
  connect(3);
  ranks_[0]->begin(1);
  ranks_[2]->begin(1);
  std::vector<UnitService::Came> came;
  all([&](Rank& rank, int number) -> Task<> {
    if (number == 1) {
      co_await pause(reactor_, 1ms);
      co_await rank.service.close();
      co_await rank.tasks.wait_idle();
      ranks_[1].reset();
      co_return;
    }
    WorkGroup brings(reactor_);
    const auto bring = [&](StreamedUnit unit) -> Task<> {
      came.push_back(co_await rank.bring(1, unit));
    };
    for (StreamedUnit u = 0; u < kUnits; ++u) brings.spawn(bring(u));
    co_await brings.wait_idle();
  });
  EXPECT_EQ(came.size(), 2 * kUnits);
  EXPECT_THAT(came, Each(kClosed));
  ranks_.erase(ranks_.begin() + 1);
  close_all();
}

// Such as when something cannot be read that it had begun to bring ahead.
TEST_F(UnitServices, AnswerToTheEndThoughTheEngineFailsWhileItCloses) {
  for (const Nanoseconds failed : {50us, 150us, 1000us, 3000us}) {
    connect(3);
    begin_all(1);
    ranks_[1]->seed = 1000;
    std::size_t came = 0;
    all([&](Rank& rank, int number) -> Task<> {
      if (number == 1) {
        co_await pause(reactor_, 100us);
        WorkGroup closing(reactor_);
        closing.spawn(rank.service.close());
        co_await pause(reactor_, failed);
        rank.cancel.cancel(std::make_exception_ptr(Error(ErrorCode::kDataLoss, "damaged")));
        co_await closing.wait_idle();
        co_await rank.tasks.wait_idle();
        co_return;
      }
      WorkGroup brings(reactor_);
      const auto bring = [&](StreamedUnit unit) -> Task<> {
        co_await rank.bring(1, unit);
        ++came;
      };
      for (StreamedUnit u = 0; u < kUnits; ++u) brings.spawn(bring(u));
      co_await brings.wait_idle();
    });
    EXPECT_EQ(came, 2 * kUnits);
    ranks_.erase(ranks_.begin() + 1);
    close_all();
  }
}

TEST_F(UnitServices, OfAnEngineThatHasEndedAnswerNothing) {
  connect(2);
  begin_all(1);
  ranks_[1]->cancel.cancel(std::make_exception_ptr(Error(ErrorCode::kCancelled, "it has ended")));
  const auto ask = [&](Rank& rank) -> Task<> {
    std::string words;
    try {
      co_await rank.bring(1, 0);
    } catch (const Error& error) {
      words = error.what();
    }
    EXPECT_THAT(words, HasSubstr("aborted"));
  };
  all([&](Rank& rank, int number) -> Task<> {
    if (number == 0) {
      co_await ask(rank);
    } else {
      co_await pause(reactor_, 1ms);
      EXPECT_EQ(rank.tasks.count(), 0U);
      communicators_[1]->abort("as an engine does that fails");
    }
  });
}

// Whatever each rank does when, nothing hangs, and nothing comes of another generation.
class UnitServicesAtRandom : public UnitServices, public ::testing::WithParamInterface<unsigned> {
 protected:
  /// Brings a few units at once.
  Task<> bring_some(Rank& rank, int number, std::minstd_rand& random) {
    WorkGroup brings(reactor_);
    const auto bring = [this](Rank& its, int from, StreamedUnit unit) -> Task<> {
      if (co_await its.bring(from, unit) == kClosed) ++closed_;
    };
    for (unsigned n = random() % 6; n > 0; --n) {
      const auto from = static_cast<int>(random() % ranks_.size());
      if (from != number) brings.spawn(bring(rank, from, random() % kUnits));
    }
    co_await brings.wait_idle();
  }
  std::size_t closed_ = 0;
};

TEST_P(UnitServicesAtRandom, GiveWhatIsAskedForOrSayWhyNot) {
  connect(GetParam() % 2 == 0 ? 2 : 4);
  for (const auto& rank : ranks_) rank->seed = 300;
  // All ranks agree to a step, each at its own time, and go on.
  const std::size_t size = ranks_.size();
  all([&](Rank& rank, int number) -> Task<> {
    std::minstd_rand random(GetParam() * 31 + static_cast<unsigned>(number) + 1);
    std::unique_ptr<Communicator> steps = communicators_[static_cast<std::size_t>(number)]->split(
        size == 2 ? std::vector<int>{0, 1} : std::vector<int>{0, 1, 2, 3});
    for (std::uint64_t generation = 0; generation < 6; ++generation) {
      co_await pause(reactor_, std::chrono::microseconds(random() % 2000));
      rank.begin(generation);
      co_await bring_some(rank, number, random);
      EXPECT_EQ(closed_, 0U);
      // What is brought ahead goes on while the step begins.
      WorkGroup ahead(reactor_);
      ahead.spawn(bring_some(rank, number, random));
      co_await steps->barrier();
      co_await rank.service.begin_changes();
      co_await ahead.wait_idle();
    }
    rank.begin(6);
    WorkGroup ahead(reactor_);
    ahead.spawn(bring_some(rank, number, random));
    co_await pause(reactor_, std::chrono::microseconds(random() % 1000));
    co_await rank.service.close();
    co_await ahead.wait_idle();
    co_await rank.tasks.wait_idle();
    ranks_[static_cast<std::size_t>(number)].reset();
  });
}

INSTANTIATE_TEST_SUITE_P(Seeds, UnitServicesAtRandom, ::testing::Range(1U, 101U));

}  // namespace unit_service_test
}  // namespace ziggurat::testing
