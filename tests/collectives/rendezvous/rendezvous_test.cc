// SPDX-License-Identifier: Apache-2.0
// tests/collectives/rendezvous/rendezvous_test.cc: how ranks find each other, and who is turned
// away.
#include "collectives/rendezvous/rendezvous.h"

#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "base/runtime/async.h"
#include "base/runtime/for_each.h"
#include "collectives/random.h"
#include "collectives/rendezvous/handshake.h"
#include "collectives/rendezvous/local_secret.h"
#include "collectives/rendezvous/rank_address.h"
#include "tests/collectives/rendezvous/rendezvous_ranks.h"
#include "tests/support/child_process.h"
#include "tests/support/free_port.h"
#include "tests/support/sanitized.h"

namespace ziggurat {
namespace rendezvous_test {

namespace asio = boost::asio;
using asio::ip::tcp;
using ::testing::HasSubstr;

Environment variables(std::map<std::string, std::string> values) {
  return [values = std::move(values)](const char* name) -> std::optional<std::string> {
    const auto found = values.find(name);
    if (found == values.end()) return std::nullopt;
    return found->second;
  };
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
  const std::function<Task<>(std::size_t)> one = [&](std::size_t i) -> Task<> {
    try {
      outcome.connected[i] = co_await meet_ranks(reactor, ranks[i]);
    } catch (const Error& error) {
      outcome.errors[i] = error.what();
    }
    outcome.connected[i].peers.clear();  // sockets are this reactor's
  };
  reactor.block_on(for_each_index(reactor, ranks.size(), ranks.size(), one));
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
  EXPECT_EQ(mpirun.collectives, Collectives::kAuto);

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

// If they met at one port, the ranks of one job would come to the other.
TEST(RankOptions, TwoJobsOfAHostMeetAtDifferentPorts) {
  const auto of_slurm = [](const char* job, const char* step) {
    return rank_options(variables({{"SLURM_PROCID", "1"},
                                   {"SLURM_STEP_NUM_TASKS", "2"},
                                   {"SLURM_LOCALID", "1"},
                                   {"SLURM_STEP_TASKS_PER_NODE", "2"},
                                   {"SLURM_JOB_ID", job},
                                   {"SLURM_STEP_ID", step}}))
        .rendezvous;
  };
  EXPECT_EQ(of_slurm("77", "0"), "127.0.0.1:30077");
  EXPECT_EQ(of_slurm("78", "0"), "127.0.0.1:30078");
  EXPECT_NE(of_slurm("77", "1"), of_slurm("77", "0"));
  const auto of_mpirun = [](const char* job) {
    return rank_options(variables({{"OMPI_COMM_WORLD_RANK", "1"},
                                   {"OMPI_COMM_WORLD_SIZE", "2"},
                                   {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                   {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                   {"PMIX_NAMESPACE", job}}))
        .rendezvous;
  };
  EXPECT_NE(of_mpirun("904396801"), of_mpirun("904396802"));
}

TEST(RankOptions, SayWhatCarriesWhatRanksSay) {
  const auto collectives = [](const char* name) {
    return rank_options(variables({{"RANK", "0"},
                                   {"WORLD_SIZE", "2"},
                                   {"LOCAL_RANK", "0"},
                                   {"LOCAL_WORLD_SIZE", "2"},
                                   {"ZIGGURAT_RANKS", name}}))
        .collectives;
  };
  EXPECT_EQ(collectives("tcp"), Collectives::kTcp);
  EXPECT_EQ(collectives("mpi"), Collectives::kMpi);
  EXPECT_EQ(collectives("nccl"), Collectives::kNccl);
  EXPECT_THROW(collectives("gloo"), Error);
}

TEST(RankOptions, SayWhoAddsWhatGpusSend) {
  const auto reduce = [](const char* name) {
    return rank_options(variables({{"ZIGGURAT_REDUCE", name}})).reduce;
  };
  EXPECT_EQ(rank_options(variables({})).reduce, Reduce::kRanks);
  EXPECT_EQ(reduce("ranks"), Reduce::kRanks);
  EXPECT_EQ(reduce("nccl"), Reduce::kNccl);
  EXPECT_THROW(reduce("ring"), Error);
}

// The ranks meet at the port after torchrun's own, so that one must exist.
TEST(RankOptions, TakeThePortsThatHaveANextOne) {
  const auto rendezvous = [](const char* port) {
    return rank_options(variables({{"RANK", "0"},
                                   {"WORLD_SIZE", "2"},
                                   {"LOCAL_RANK", "0"},
                                   {"MASTER_ADDR", "node0"},
                                   {"MASTER_PORT", port}}))
        .rendezvous;
  };
  EXPECT_EQ(rendezvous("1"), "node0:2");
  EXPECT_EQ(rendezvous("65534"), "node0:65535");
  for (const char* wrong : {"", "0", "-1", "65535", "99999999999", "29500x"})
    EXPECT_THROW(rendezvous(wrong), Error) << wrong;
}

TEST(RankOptions, OverSeveralHostsSomebodyMustSayWhere) {
  const auto environment = variables({{"OMPI_COMM_WORLD_RANK", "1"},
                                      {"OMPI_COMM_WORLD_SIZE", "4"},
                                      {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                      {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  const RankOptions options = rank_options(environment);
  EXPECT_EQ(options.rendezvous, "") << "MPI, for one, needs none";
  try {
    Reactor reactor;
    reactor.block_on(meet_ranks(reactor, options));
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
  EXPECT_THAT(sums, ::testing::ElementsAre(11u, 11u));
}

TEST(Rendezvous, OneRankIsToldThatItsBackEndChangesNothing) {
  Reactor reactor;
  WorkerPool workers({.threads = 1, .cpus = {}});
  RankOptions options;
  options.collectives = Collectives::kNccl;
  EXPECT_EQ(connect_ranks(reactor, workers, options)->world_size(), 1);
  EXPECT_THAT(degraded_modes(),
              ::testing::Contains(
                  HasSubstr("collectives=nccl has no effect, because the job has one rank")));
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
    const Caller caller{ConnectionKind::kJoin, options.rank, options.world_size, 0};
    Session session;
    const auto socket = co_await call_until_accepted(reactor, port, caller, &session);
    const std::string row = RankAddress{}.to_json().dump();
    co_await write_message(*socket, session, row);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the others have likely come too
    reactor.external_end();
  };
  reactor.block_on(visit());
}

// Nobody waits for the minutes that ranks have to come.
TEST(Rendezvous, ARankThatCameAndWentIsMissedByAll) {
  const std::uint16_t port = free_port();
  std::vector<RankOptions> ranks{options_of(0, 4, port), options_of(1, 4, port)};
  ranks[1].connect_timeout = std::chrono::seconds(3);
  std::thread third(come_and_go, options_of(2, 4, port), port);
  const Outcome outcome = meet(ranks);
  third.join();
  EXPECT_THAT(outcome.errors[0], HasSubstr("rank 2 went away"));
  // It hears of it from rank 0 if it came in time; else it finds nobody there any more.
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
  EXPECT_THAT(outcome.errors[1] + outcome.errors[2],
              HasSubstr("a process with rank 1 has joined already"));
}

TEST(Rendezvous, RanksMustAgreeHowManyTheyAre) {
  const std::uint16_t port = free_port();
  std::vector<RankOptions> ranks{options_of(0, 2, port), options_of(1, 3, port)};
  ranks[0].connect_timeout = std::chrono::milliseconds(500);
  const Outcome outcome = meet(ranks);
  EXPECT_THAT(outcome.errors[1],
              HasSubstr("rank 1 says that there are 3 ranks, but rank 0 says 2"));
}

TEST(Rendezvous, WithoutASecretOnlyThisMachineIsServed) {
  RankOptions options = options_of(0, 2, free_port());
  options.secret.clear();
  options.rendezvous = "192.0.2.1:" + options.rendezvous.substr(options.rendezvous.find(':') + 1);
  options.connect_timeout = std::chrono::milliseconds(200);
  EXPECT_THAT(meet({options}).errors[0], HasSubstr("there is no secret"));
  options.without_secret = true;  // asked for: whose address that is does not matter to rank 0
  EXPECT_THAT(meet({options}).errors[0], HasSubstr("rank 1 did not come"));
}

// A host's own name often resolves to a loopback address there (127.0.1.1 on Debian), which says
// nothing of where the other ranks are.
TEST(Rendezvous, ANameIsNoReasonToGoWithoutASecret) {
  RankOptions options = options_of(0, 2, free_port());
  options.secret.clear();
  options.rendezvous = "ip6-localhost" + options.rendezvous.substr(options.rendezvous.find(':'));
  EXPECT_THAT(meet({options}).errors[0], HasSubstr("there is no secret"));
}

TEST(Rendezvous, RankZeroListensOnEveryAddressOfItsMachine) {
  const std::uint16_t port = free_port();
  std::vector<RankOptions> ranks{options_of(0, 2, port), options_of(1, 2, port)};
  ranks[0].rendezvous = "192.0.2.1:" + std::to_string(port);  // not here: behind NAT, say
  const Outcome outcome = meet(ranks);
  EXPECT_THAT(outcome.errors, ::testing::Each(""));
}

TEST(Rendezvous, RanksOfOneHostNeedNoSecretOfTheirUser) {
  const std::uint16_t port = free_port();
  std::vector<RankOptions> ranks;
  for (int r = 0; r < 3; ++r) {
    ranks.push_back(options_of(r, 3, port));
    ranks.back().secret.clear();
    ranks.back().one_host = true;  // as torchrun and srun say
    ranks.back().rendezvous = "some-node:" + std::to_string(port);
  }
  EXPECT_THAT(meet(ranks).errors, ::testing::Each(""));
}

/// Has `port` as any process may, which got it from the kernel for a connection of its own.
class PortTaken {
 public:
  explicit PortTaken(std::uint16_t port)
      : socket_(context_, tcp::endpoint(asio::ip::address_v4::loopback(), port)) {}

 private:
  asio::io_context context_;
  tcp::socket socket_;
};

TEST(Rendezvous, RanksOfOneHostMeetElsewhereIfTheirPortIsTaken) {
  const std::uint16_t port = free_port();
  const PortTaken taken(port);
  std::vector<RankOptions> ranks{options_of(0, 2, port), options_of(1, 2, port)};
  for (RankOptions& options : ranks) options.secret.clear();
  EXPECT_THAT(meet(ranks).errors, ::testing::Each(""));
}

TEST(Rendezvous, APortThatIsTakenIsNamedWithTheFixWhereNobodyCouldTellAnother) {
  const std::uint16_t port = free_port();
  const PortTaken taken(port);
  std::vector<RankOptions> ranks{options_of(0, 2, port)};
  EXPECT_THAT(meet(ranks).errors[0],
              ::testing::AllOf(HasSubstr(std::to_string(port)), HasSubstr("EADDRINUSE"),
                               HasSubstr("another port, ZIGGURAT_RENDEZVOUS=HOST:PORT")));
}

TEST(Rendezvous, ARankDoesNotWaitForEverForAProcessThatSaysNothing) {
  const std::uint16_t port = free_port();
  asio::io_context context;
  using Local = asio::local::stream_protocol;
  const std::string name = std::string(1, '\0') + "ziggurat-rendezvous-" + std::to_string(port);
  const Local::acceptor silent(context, Local::endpoint(name));
  RankOptions options = options_of(1, 2, port);
  options.secret.clear();
  options.connect_timeout = std::chrono::milliseconds(300);
  EXPECT_THAT(meet({options}).errors[0], HasSubstr("waited in vain: rank 0 did not come"));
}

/// What `body` returned in a process of another user.
std::string as_another_user(uid_t user, const std::function<std::string()>& body) {
  return in_child_process(
      [&]() -> std::string { return ::setuid(user) == 0 ? body() : "cannot become another user"; });
}

constexpr uid_t kStranger = 65'534;

TEST(LocalSecret, IsForProcessesOfTheSameUserAndNobodyElse) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  const std::uint16_t port = free_port();
  const std::string secret = random_secret();
  Reactor reactor;
  reactor.start();
  const auto giver = std::make_shared<LocalSecret>(reactor, port, LocalInvitation{secret, 7});
  const auto open = [&]() -> Task<> {
    giver->open();
    co_return;
  };
  reactor.block_on(open());
  const auto asked = [port] {
    Reactor own;
    own.start();
    const LocalInvitation got = own.block_on(local_invitation(own, port, std::chrono::minutes(1)));
    return "got " + got.secret + (got.port == 7 ? " at 7" : "");
  };
  EXPECT_EQ(asked(), "got " + secret + " at 7");
  // A test may fork where there are threads: the child needs nothing of theirs.
  const std::string strangers = as_another_user(kStranger, asked);
  EXPECT_THAT(strangers, ::testing::Not(HasSubstr(secret)));
#ifndef ZIGGURAT_SANITIZES_THREADS  // it ends a forked child that starts one
  EXPECT_THAT(strangers,
              ::testing::AnyOf("got ", HasSubstr("but this process runs as user 65534")));
#endif
  const auto close = [&]() -> Task<> {
    giver->close();
    co_return;
  };
  reactor.block_on(close());
}

TEST(LocalSecret, OneThatAnotherUserHandsOutIsRefusedAndTheUserNamed) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  const std::uint16_t port = free_port();
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t squatter = ::fork();
  if (squatter == 0) {
    if (::setuid(kStranger) != 0) ::_exit(1);
    Reactor reactor;
    const auto giver =
        std::make_shared<LocalSecret>(reactor, port, LocalInvitation{random_secret(), port});
    const bool told = ::write(ready[1], "x", 1) == 1;
    ::pause();
    ::_exit(told ? 0 : 1);
  }
  char c = 0;
  ASSERT_EQ(::read(ready[0], &c, 1), 1);
  std::vector<RankOptions> ranks{options_of(0, 2, port), options_of(1, 2, port)};
  for (RankOptions& options : ranks) {
    options.secret.clear();
    options.connect_timeout = std::chrono::milliseconds(500);
  }
  const Outcome outcome = meet(ranks);
  EXPECT_THAT(outcome.errors[0], HasSubstr("another user"));
  EXPECT_THAT(outcome.errors[1], HasSubstr("user 65534 hands out secrets"));
  ::kill(squatter, SIGKILL);
  ::waitpid(squatter, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
}

/// Sends what comes to an open port: scans, other protocols, wrong secrets, half a hello.
void send_bad_handshakes(std::uint16_t port, std::size_t times) {
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
      bytes[8] = 2;
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
  std::thread last([&] {  // rank 2 comes when all the bad ones have come
    while (!somebody_listens(port)) std::this_thread::yield();
    send_bad_handshakes(port, 2000);
    reactor.block_on(one(2));
  });
  reactor.block_on(both());
  last.join();
  EXPECT_THAT(errors, ::testing::Each(""));
}

}  // namespace rendezvous_test
}  // namespace ziggurat
