// SPDX-License-Identifier: Apache-2.0
// tests/collectives/simulated/mirrored_communicator_test.cc: one rank that stands for all takes the
// time, sends the bytes and gets the values that it would among ranks which exist.
#include "collectives/simulated/mirrored_communicator.h"

#include <gmock/gmock.h>

#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/runtime/async.h"
#include "collectives/simulated/simulated_communicator.h"

namespace ziggurat {
namespace mirrored_communicator_test {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using Ranks = std::vector<std::unique_ptr<Communicator>>;
using OnRank = std::function<Task<>(Communicator&)>;

constexpr std::size_t kCount = 240'000;  // divides by all numbers of ranks here

/// What a body took and sent on rank 0.
struct Outcome {
  double seconds = 0;
  double near_bytes = 0;  ///< the mean of all ranks
  double far_bytes = 0;
};

Outcome outcome_of(Reactor& reactor, const Ranks& ranks, const OnRank& body) {
  const auto all = [&]() -> Task<> {
    WorkGroup group(reactor);
    for (const auto& rank : ranks) group.spawn(body(*rank));
    co_await group.wait_idle();
  };
  reactor.block_on(all());
  Outcome outcome{.seconds = 1e-9 * static_cast<double>(reactor.clock().now().count())};
  for (const auto& rank : ranks) {
    const Traffic traffic = rank->traffic();
    const auto count = static_cast<double>(ranks.size());
    outcome.near_bytes += static_cast<double>(traffic.same_host.payload_bytes) / count;
    outcome.far_bytes += static_cast<double>(traffic.other_hosts.payload_bytes) / count;
  }
  return outcome;
}

struct Call {
  const char* name;
  OnRank body;
};

std::vector<Call> calls() {
  return {{"all_gather",
           [](Communicator& c) -> Task<> {
             std::vector<std::byte> mine(kCount, std::byte{7});
             std::vector<std::byte> all(kCount * static_cast<std::size_t>(c.world_size()));
             co_await c.all_gather(mine, all);
             for (const std::byte value : all) EXPECT_EQ(value, std::byte{7});
           }},
          {"reduce_scatter",
           [](Communicator& c) -> Task<> {
             const auto ranks = static_cast<std::size_t>(c.world_size());
             std::vector<float> values(kCount * ranks, 1.5F);
             std::vector<float> sum(kCount);
             co_await c.reduce_scatter(std::as_bytes(std::span(values)),
                                       std::as_writable_bytes(std::span(sum)), DType::kFloat32);
             for (const float value : sum) EXPECT_EQ(value, 1.5F * static_cast<float>(ranks));
           }},
          {"all_reduce",
           [](Communicator& c) -> Task<> {
             std::vector<float> values(kCount, 2.0F);
             co_await c.all_reduce(std::as_writable_bytes(std::span(values)), DType::kFloat32);
             for (const float value : values)
               EXPECT_EQ(value, 2.0F * static_cast<float>(c.world_size()));
           }},
          {"all_reduce of values",
           [](Communicator& c) -> Task<> {
             std::vector<std::uint64_t> values{3, 4};
             co_await c.all_reduce(values, Communicator::Op::kSum);
             const auto ranks = static_cast<std::uint64_t>(c.world_size());
             EXPECT_EQ(values, (std::vector<std::uint64_t>{3 * ranks, 4 * ranks}));
           }},
          {"all_to_all",
           [](Communicator& c) -> Task<> {
             const auto ranks = static_cast<std::size_t>(c.world_size());
             std::vector<std::byte> from(kCount * ranks, std::byte{9});
             std::vector<std::byte> to(kCount * ranks);
             co_await c.all_to_all(from, to);
             EXPECT_EQ(to, from);
           }},
          {"barrier", [](Communicator& c) -> Task<> { co_await c.barrier(); }},
          {"two gathers at once",
           [](Communicator& c) -> Task<> {
             std::vector<std::byte> mine(kCount);
             const std::size_t all = kCount * static_cast<std::size_t>(c.world_size());
             std::vector<std::byte> one(all);
             std::vector<std::byte> other(all);
             Task<> first = c.all_gather(mine, one);
             Task<> second = c.all_gather(mine, other);
             co_await std::move(first);
             co_await std::move(second);
           }},
          {"groups of ranks with the same place on their nodes", [](Communicator& c) -> Task<> {
             // The groups of a node use its port at the same time.
             const int half = c.world_size() / 2;
             std::vector<int> members{c.rank() % half, c.rank() % half + half};
             const auto group = c.split(members);
             std::vector<std::byte> mine(kCount);
             std::vector<std::byte> all(2 * kCount);
             co_await group->all_gather(mine, all);
           }}};
}

TEST(MirroredCommunicator, TakesTheTimeAndSendsTheBytesOfRanksThatExist) {
  struct Shape {
    int ranks, per_node;
  };
  for (const Route route : {Route::kDirect, Route::kRing}) {
    for (const Shape shape : {Shape{2, 2}, Shape{8, 8}, Shape{8, 4}, Shape{12, 2}, Shape{6, 1}}) {
      const NetworkShape network{.ranks = shape.ranks,
                                 .ranks_per_node = shape.per_node,
                                 .within_node = {10e9, 3us},
                                 .between_nodes = {4e9, 10us},
                                 .route = route};
      for (const Call& call : calls()) {
        SCOPED_TRACE(::testing::Message()
                     << call.name << " among " << shape.ranks << ", " << shape.per_node
                     << " to a node, route " << static_cast<int>(route));
        Reactor reactor{Clock::Kind::kVirtual};
        const Outcome real =
            outcome_of(reactor, SimulatedCommunicator::create(reactor, network), call.body);
        Reactor alone{Clock::Kind::kVirtual};
        Ranks one;
        one.push_back(MirroredCommunicator::create(alone, network));
        const Outcome mirrored = outcome_of(alone, one, call.body);
        // Direct messages among many nodes wait for each other, and calls in rings for other calls.
        const bool waits = shape.ranks > 2 * shape.per_node;
        const double part = route == Route::kRing ? 0.15 : 0.03;
        EXPECT_LE(mirrored.seconds, (1 + part) * real.seconds + 1e-6);
        EXPECT_GE(mirrored.seconds, real.seconds / (waits ? 2 : 1 + part) - 1e-6);
        EXPECT_NEAR(mirrored.near_bytes, real.near_bytes, 1);
        EXPECT_NEAR(mirrored.far_bytes, real.far_bytes, 1);
      }
    }
  }
}

TEST(MirroredCommunicator, RefusesMessagesToOneRankAndEverythingAfter) {
  Reactor reactor{Clock::Kind::kVirtual};
  const auto rank = MirroredCommunicator::create(reactor, {.ranks = 4, .ranks_per_node = 4});
  std::vector<std::byte> bytes(8);
  for (int i = 0; i < 2; ++i) {
    try {
      reactor.block_on(rank->send(bytes, 1));
      ADD_FAILURE() << "rank 1 does not exist";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr("only repeat what it does"));
    }
  }
  EXPECT_THROW(reactor.block_on(rank->barrier()), Error);
}

TEST(MirroredCommunicator, AbortEndsWhatIsUnderWay) {
  Reactor reactor{Clock::Kind::kVirtual};
  const auto rank = MirroredCommunicator::create(
      reactor, {.ranks = 4, .ranks_per_node = 4, .within_node = {1e9, 1s}});
  Task<> waiting = rank->barrier();
  rank->abort("for a test");
  try {
    reactor.block_on(std::move(waiting));
    ADD_FAILURE() << "the barrier ended";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
    EXPECT_THAT(error.what(), HasSubstr("for a test"));
  }
}

}  // namespace mirrored_communicator_test
}  // namespace ziggurat
