// SPDX-License-Identifier: Apache-2.0
// tests/collectives/simulated/simulated_network_test.cc: how long simulated collectives take, by
// hand; what becomes of ranks that differ or do not come. (What they compute: the conformance
// suite.)
#include "collectives/simulated/simulated_network.h"

#include <gmock/gmock.h>

#include <vector>

#include "base/error.h"
#include "base/runtime/async.h"
#include "collectives/simulated/simulated_communicator.h"

namespace ziggurat {
namespace simulated_network_test {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::size_t kMegabyte = 1'000'000;

/// Ranks of one reactor in virtual time, 1 GB/s: a megabyte a millisecond.
class SimulatedRanks : public ::testing::Test {
 protected:
  using OnRank = std::function<Task<>(Communicator&)>;

  void connect(int ranks, int per_node, SimulatedLink between = {1e9, 0us}) {
    ranks_ = SimulatedCommunicator::create(reactor_, {.ranks = ranks,
                                                      .ranks_per_node = per_node,
                                                      .within_node = {1e9, 10us},
                                                      .between_nodes = between});
  }
  /// Virtual time that `body` takes on all ranks.
  Nanoseconds time_of(const OnRank& body) {
    const Nanoseconds before = reactor_.clock().now();
    const auto all = [this, &body]() -> Task<> {
      WorkGroup group(reactor_);
      for (const auto& rank : ranks_) group.spawn(body(*rank));
      co_await group.wait_idle();
    };
    reactor_.block_on(all());
    return reactor_.clock().now() - before;
  }
  std::string failure(const OnRank& body, ErrorCode code) {
    std::vector<std::string> texts;
    const OnRank guarded = [&](Communicator& c) -> Task<> {
      try {
        co_await body(c);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), code) << error.what();
        texts.push_back(error.what());
      }
    };
    time_of(guarded);
    EXPECT_GT(texts.size(), 0U);
    for (const std::string& text : texts) EXPECT_EQ(text, texts[0]);
    return texts.empty() ? "" : texts[0];
  }
  static Task<> gather(Communicator& c, std::size_t slice_bytes) {
    std::vector<std::byte> mine(slice_bytes);
    std::vector<std::byte> all(slice_bytes * static_cast<std::size_t>(c.world_size()));
    co_await c.all_gather(mine, all);
  }

  Reactor reactor_{Clock::Kind::kVirtual};
  std::vector<std::unique_ptr<Communicator>> ranks_;
};

TEST_F(SimulatedRanks, AGatherSendsItsSliceToEachOtherRankInTurn) {
  connect(4, 4);
  const OnRank body = [](Communicator& c) { return gather(c, kMegabyte); };
  EXPECT_EQ(time_of(body), 3ms + 10us);
}

TEST_F(SimulatedRanks, AnAllReduceIsTwoGathersOfItsSlices) {
  connect(4, 4);
  const OnRank body = [](Communicator& c) -> Task<> {
    std::vector<float> values(kMegabyte);  // 4 MB: slices of 1 MB
    co_await c.all_reduce(std::as_writable_bytes(std::span(values)), DType::kFloat32);
  };
  EXPECT_EQ(time_of(body), 2 * (3ms + 10us));
}

// Two nodes of four: each rank sends four slices to the other node, so its node's port sends 16.
TEST_F(SimulatedRanks, RanksOfANodeShareItsPort) {
  connect(8, 4);
  const OnRank body = [](Communicator& c) { return gather(c, kMegabyte); };
  const Nanoseconds time = time_of(body);
  EXPECT_GE(time, 16ms);
  EXPECT_LE(time, 19ms);
  EXPECT_EQ(ranks_[0]->traffic().other_hosts.payload_bytes, 4 * kMegabyte);
  EXPECT_EQ(ranks_[0]->traffic().same_host.payload_bytes, 3 * kMegabyte);
}

TEST_F(SimulatedRanks, ASlowLinkIsSlowAndLatencyIsPaidOnce) {
  connect(2, 1, {.bytes_per_s = 1e8, .latency = 5ms});
  const OnRank body = [](Communicator& c) { return gather(c, kMegabyte); };
  EXPECT_EQ(time_of(body), 10ms + 5ms);
}

TEST_F(SimulatedRanks, CallsUnderWayTogetherShareTheLinks) {
  connect(2, 2);
  const OnRank body = [](Communicator& c) -> Task<> {
    std::vector<std::byte> mine(kMegabyte);
    std::vector<std::byte> a(2 * kMegabyte);
    std::vector<std::byte> b(2 * kMegabyte);
    Task<> first = c.all_gather(mine, a);
    Task<> second = c.all_gather(mine, b);
    co_await std::move(first);
    co_await std::move(second);
  };
  EXPECT_EQ(time_of(body), 2ms + 10us);
}

TEST_F(SimulatedRanks, ALateRankIsWaitedForAndNamed) {
  connect(3, 3);
  const OnRank body = [&](Communicator& c) -> Task<> {
    Signal awake(reactor_);
    reactor_.clock().after(c.rank() == 2 ? 7ms : 0ms, [&] { awake.set(); });
    co_await awake.wait();
    co_await c.barrier();
  };
  EXPECT_EQ(time_of(body), 7ms + 10us);
  EXPECT_EQ(ranks_[0]->traffic().waited[2], 7ms);
  EXPECT_EQ(ranks_[0]->traffic().waited[1], 0ms);
  EXPECT_EQ(ranks_[2]->traffic().waited[0], 0ms);
}

TEST_F(SimulatedRanks, DifferentCallsFailOnAllAndBothAreNamed) {
  connect(3, 3);
  const OnRank body = [](Communicator& c) -> Task<> {
    if (c.rank() == 1) {
      co_await c.barrier();
    } else {
      co_await gather(c, 100);
    }
  };
  EXPECT_THAT(failure(body, ErrorCode::kInvalidArgument),
              AllOf(HasSubstr("rank 0 all_gather of 100"), HasSubstr("rank 1 barrier")));
}

TEST_F(SimulatedRanks, ARankThatNeverComesIsAnErrorThatNamesIt) {
  connect(3, 3);
  const OnRank body = [](Communicator& c) -> Task<> {
    if (c.rank() != 2) co_await gather(c, 100);
  };
  EXPECT_THAT(
      failure(body, ErrorCode::kDeadlineExceeded),
      AllOf(HasSubstr("all_gather of 100"), HasSubstr("waits for rank 2, which did not come")));
}

TEST_F(SimulatedRanks, AnAbortEndsWhatIsUnderWay) {
  connect(2, 2);
  const OnRank body = [&](Communicator& c) -> Task<> {
    if (c.rank() == 1) reactor_.clock().after(1us, [&] { ranks_[1]->abort("out of disk"); });
    co_await gather(c, kMegabyte);
  };
  EXPECT_THAT(failure(body, ErrorCode::kUnavailable), HasSubstr("out of disk"));
}

TEST(SimulatedNetwork, HundredsOfRanksAreQuick) {
  Reactor reactor(Clock::Kind::kVirtual);
  const auto ranks = SimulatedCommunicator::create(
      reactor, {.ranks = 256, .ranks_per_node = 8, .within_node = {}, .between_nodes = {}});
  std::vector<std::uint64_t> ones(256, 1);
  const auto all = [&]() -> Task<> {
    WorkGroup group(reactor);
    for (std::size_t r = 0; r < ranks.size(); ++r)
      group.spawn(ranks[r]->all_reduce(std::span(ones).subspan(r, 1), Communicator::Op::kSum));
    co_await group.wait_idle();
  };
  reactor.block_on(all());
  EXPECT_THAT(ones, ::testing::Each(256U));
}

TEST(SimulatedNetwork, RefusesLinksOfNothing) {
  EXPECT_THROW(SimulatedNetwork({.ranks = 2, .ranks_per_node = 2, .within_node = {0, 0us}}), Error);
  EXPECT_THROW(SimulatedNetwork({.ranks = 0}), Error);
}

}  // namespace simulated_network_test
}  // namespace ziggurat
