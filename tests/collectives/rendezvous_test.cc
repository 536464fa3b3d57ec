// SPDX-License-Identifier: Apache-2.0
// tests/collectives/rendezvous_test.cc: how ranks find each other, and who is turned away.
#include "collectives/rendezvous.h"

#include <gmock/gmock.h>

#include <array>
#include <boost/asio/read.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <chrono>
#include <cstring>
#include <map>
#include <random>
#include <thread>

#include "base/error.h"
#include "base/runtime/async.h"
#include "collectives/handshake.h"
#include "collectives/rank_row.h"

namespace ziggurat {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using testing::HasSubstr;

Environment variables(std::map<std::string, std::string> values) {
  return [values = std::move(values)](const char* name) -> std::optional<std::string> {
    const auto found = values.find(name);
    if (found == values.end()) return std::nullopt;
    return found->second;
  };
}

std::uint16_t free_port() {
  asio::io_context context;
  return tcp::acceptor(context, tcp::endpoint(asio::ip::address_v4::loopback(), 0))
      .local_endpoint()
      .port();
}

RankOptions options_of(int rank, int world, std::uint16_t port) {
  RankOptions options;
  options.rank = rank;
  options.world_size = world;
  options.rendezvous = "127.0.0.1:" + std::to_string(port);
  options.secret = "a secret of this test";
  options.connect_timeout = std::chrono::seconds(30);
  return options;
}

/// Every rank on one reactor; what each ended with, empty where it was connected.
struct Outcome {
  std::vector<TcpOptions> connected;
  std::vector<std::string> errors;
};
Outcome meet(const std::vector<RankOptions>& ranks) {
  Outcome outcome;
  outcome.connected.resize(ranks.size());
  outcome.errors.resize(ranks.size());
  Reactor reactor;
  reactor.start();
  const auto one = [&](std::size_t i) -> Task<> {
    try {
      outcome.connected[i] = co_await meet_ranks(reactor, ranks[i]);
    } catch (const Error& error) {
      outcome.errors[i] = error.what();
    }
    outcome.connected[i].peers.clear();  // sockets are this reactor's
  };
  const auto all = [&]() -> Task<> {
    WorkGroup group(reactor);
    for (std::size_t i = 0; i < ranks.size(); ++i) group.spawn(one(i));
    co_await group.wait_idle();
  };
  reactor.block_on(all());
  return outcome;
}

bool somebody_listens(std::uint16_t port) {
  asio::io_context context;
  tcp::socket socket(context);
  boost::system::error_code error;
  socket.connect({asio::ip::address_v4::loopback(), port}, error);
  return !error;
}

TEST(RankOptions, AreWhatTheLauncherSays) {
  const RankOptions alone = rank_options(variables({}));
  EXPECT_EQ(alone.rank, 0);
  EXPECT_EQ(alone.world_size, 1);

  const RankOptions torchrun = rank_options(variables({{"RANK", "3"},
                                                       {"WORLD_SIZE", "4"},
                                                       {"LOCAL_RANK", "1"},
                                                       {"LOCAL_WORLD_SIZE", "2"},
                                                       {"MASTER_ADDR", "node0"},
                                                       {"MASTER_PORT", "29500"}}));
  EXPECT_EQ(torchrun.rank, 3);
  EXPECT_EQ(torchrun.world_size, 4);
  EXPECT_EQ(torchrun.rendezvous, "node0:29501") << "torchrun's own store has 29500";

  const RankOptions mpirun = rank_options(variables({{"OMPI_COMM_WORLD_RANK", "1"},
                                                     {"OMPI_COMM_WORLD_SIZE", "2"},
                                                     {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                                     {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}));
  EXPECT_EQ(mpirun.rank, 1);
  EXPECT_EQ(mpirun.rendezvous, "127.0.0.1:29400");

  const RankOptions srun = rank_options(variables({{"SLURM_PROCID", "5"},
                                                   {"SLURM_STEP_NUM_TASKS", "8"},
                                                   {"SLURM_LOCALID", "1"},
                                                   {"SLURM_STEP_TASKS_PER_NODE", "4(x2)"},
                                                   {"SLURM_STEP_NODELIST", "gpu[07-09,12]"},
                                                   {"SLURM_JOB_ID", "20123"}}));
  EXPECT_EQ(srun.rank, 5);
  EXPECT_EQ(srun.world_size, 8);
  EXPECT_EQ(srun.rendezvous, "gpu07:30123");
}

TEST(RankOptions, OverSeveralHostsSomebodyMustSayWhere) {
  const auto environment = variables({{"OMPI_COMM_WORLD_RANK", "1"},
                                      {"OMPI_COMM_WORLD_SIZE", "4"},
                                      {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                      {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  try {
    rank_options(environment);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("ZIGGURAT_RENDEZVOUS=HOST:PORT"));
  }
}

TEST(Rendezvous, ConnectsEveryRankToEveryOther) {
  const std::uint16_t port = free_port();
  std::vector<RankOptions> ranks;
  for (int r = 0; r < 4; ++r) ranks.push_back(options_of(r, 4, port));
  const Outcome outcome = meet(ranks);
  for (std::size_t r = 0; r < 4; ++r) {
    EXPECT_EQ(outcome.errors[r], "");
    EXPECT_NE(outcome.connected[r].epoch, 0u);
    EXPECT_EQ(outcome.connected[r].epoch, outcome.connected[0].epoch);
  }
  EXPECT_FALSE(somebody_listens(port)) << "nothing listens once all have met";
}

TEST(Rendezvous, RanksThatMetMakeACommunicator) {
  const std::uint16_t port = free_port();
  std::vector<std::uint64_t> sums(2);
  const auto rank = [&](int r) {
    Reactor reactor;
    WorkerPool workers({.threads = 1, .cpus = {}});
    reactor.start();
    const auto ranks = connect_ranks(reactor, workers, options_of(r, 2, port));
    std::vector<std::uint64_t> values{static_cast<std::uint64_t>(r) + 5};
    const auto reduce = [&]() -> Task<> {  // calls are made on the reactor's thread
      co_await ranks->all_reduce(std::span(values), Communicator::Op::kSum);
    };
    reactor.block_on(reduce());
    sums[static_cast<std::size_t>(r)] = values[0];
  };
  std::thread other(rank, 1);
  rank(0);
  other.join();
  EXPECT_THAT(sums, testing::ElementsAre(11u, 11u));
}

TEST(Rendezvous, ARankThatDoesNotComeIsNamed) {
  const std::uint16_t port = free_port();
  std::vector<RankOptions> ranks{options_of(0, 3, port), options_of(1, 3, port)};
  for (RankOptions& options : ranks) options.connect_timeout = std::chrono::milliseconds(300);
  const Outcome outcome = meet(ranks);
  EXPECT_THAT(outcome.errors[0], HasSubstr("rank 2 did not come"));
  EXPECT_THAT(outcome.errors[1], HasSubstr("rank 2 did not come"));
}

/// Comes to the rendezvous as `options` says, and goes; tries until rank 0 is there.
void come_and_go(const RankOptions& options, std::uint16_t port) {
  Reactor reactor;
  reactor.start();
  const auto visit = [&]() -> Task<> {
    reactor.external_begin();
    tcp::socket socket(reactor.context());
    boost::system::error_code error;
    do {
      socket.close();
      co_await socket.async_connect({asio::ip::address_v4::loopback(), port},
                                    asio::redirect_error(asio::use_awaitable, error));
    } while (error);
    const Introduction introduction{Errand::kJoin, options.rank, options.world_size, 0};
    Conversation conversation = co_await introduce(socket, options.secret, introduction);
    const std::string row = RankRow{}.written().dump();
    co_await write_message(socket, conversation, row);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the others have likely come too
    reactor.external_end();
  };
  reactor.block_on(visit());
}

// Not a moment of the minutes that ranks have to come is waited for.
TEST(Rendezvous, ARankThatCameAndWentIsMissedByAll) {
  const std::uint16_t port = free_port();
  std::vector<RankOptions> ranks{options_of(0, 4, port), options_of(1, 4, port)};
  ranks[1].connect_timeout = std::chrono::seconds(3);
  std::thread third(come_and_go, options_of(2, 4, port), port);
  const Outcome outcome = meet(ranks);
  third.join();
  EXPECT_THAT(outcome.errors[0], HasSubstr("rank 2 went away"));
  // From rank 0, if it came in time; else that nobody meets there any more.
  EXPECT_NE(outcome.errors[1], "");
}

TEST(Rendezvous, AnotherSecretIsRefusedAtOnce) {
  const std::uint16_t port = free_port();
  std::vector<RankOptions> ranks{options_of(0, 2, port), options_of(1, 2, port)};
  ranks[1].secret = "another";
  ranks[0].connect_timeout = std::chrono::milliseconds(500);
  const Outcome outcome = meet(ranks);
  EXPECT_THAT(outcome.errors[0], HasSubstr("rank 1 did not come"));
  EXPECT_THAT(outcome.errors[1], HasSubstr("does not know this job's secret"));
}

TEST(Rendezvous, ANumberIsOneProcesss) {
  const std::uint16_t port = free_port();
  std::vector<RankOptions> ranks{options_of(0, 3, port), options_of(1, 3, port),
                                 options_of(1, 3, port)};
  ranks[0].connect_timeout = std::chrono::milliseconds(500);
  ranks[1].connect_timeout = ranks[2].connect_timeout = std::chrono::milliseconds(500);
  const Outcome outcome = meet(ranks);
  EXPECT_THAT(outcome.errors[1] + outcome.errors[2], HasSubstr("there is a rank 1 already"));
}

TEST(Rendezvous, RanksMustAgreeHowManyTheyAre) {
  const std::uint16_t port = free_port();
  std::vector<RankOptions> ranks{options_of(0, 2, port), options_of(1, 3, port)};
  ranks[0].connect_timeout = std::chrono::milliseconds(500);
  const Outcome outcome = meet(ranks);
  EXPECT_THAT(outcome.errors[1], HasSubstr("rank 1 says there are 3 ranks, rank 0 says 2"));
}

TEST(Rendezvous, WithoutASecretOnlyThisMachineIsServed) {
  RankOptions options = options_of(0, 2, 29'999);
  options.secret.clear();
  options.rendezvous = "192.0.2.1:29999";  // reserved for documentation
  EXPECT_THAT(meet({options}).errors[0], HasSubstr("there is no secret"));
  options.without_secret = true;  // asked for: the address is what fails now
  EXPECT_THAT(meet({options}).errors[0], HasSubstr("bind at 192.0.2.1:29999"));
}

/// What comes to a port that is open: scans, other protocols, wrong secrets, half a hello.
void knock(std::uint16_t port, std::size_t times) {
  std::mt19937 random(11);
  asio::io_context context;
  std::vector<std::unique_ptr<tcp::socket>> silent;
  for (std::size_t i = 0; i < times; ++i) {
    auto socket = std::make_unique<tcp::socket>(context);
    boost::system::error_code error;
    socket->connect({asio::ip::address_v4::loopback(), port}, error);
    if (error) continue;
    std::array<unsigned char, 160> bytes;
    for (auto& b : bytes) b = static_cast<unsigned char>(random());
    std::size_t size = random() % bytes.size();
    if (i % 3 == 0) {  // a right beginning, of a rank that is to come, then a wrong proof
      std::memset(bytes.data(), 0, 32);
      std::memcpy(bytes.data(), "zig-rank", 8);
      bytes[8] = 1;
      bytes[16] = 1;
      bytes[20] = 3;
      size = 96;
    }
    asio::write(*socket, asio::buffer(bytes.data(), size), error);
    if (i % 50 == 0) silent.push_back(std::move(socket));  // stays, and says no more
  }
}

TEST(Rendezvous, TwoThousandBadHandshakesDoNotHoldUpTheJob) {
  const std::uint16_t port = free_port();
  std::vector<RankOptions> ranks;
  for (int r = 0; r < 3; ++r) ranks.push_back(options_of(r, 3, port));
  std::vector<std::string> errors(3);
  Reactor reactor;
  reactor.start();
  const auto one = [&](std::size_t i) -> Task<> {
    try {
      const TcpOptions met = co_await meet_ranks(reactor, ranks[i]);
    } catch (const Error& error) {
      errors[i] = error.what();
    }
  };
  const auto both = [&]() -> Task<> {
    WorkGroup group(reactor);
    group.spawn(one(0));
    group.spawn(one(1));
    co_await group.wait_idle();
  };
  std::thread last([&] {  // rank 2 comes when all the others have knocked
    while (!somebody_listens(port)) std::this_thread::yield();
    knock(port, 2000);
    reactor.block_on(one(2));
  });
  reactor.block_on(both());
  last.join();
  EXPECT_THAT(errors, testing::Each(""));
}

}  // namespace
}  // namespace ziggurat
