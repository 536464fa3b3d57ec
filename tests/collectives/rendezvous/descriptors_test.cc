// SPDX-License-Identifier: Apache-2.0
// tests/collectives/rendezvous/descriptors_test.cc: jobs of hundreds of ranks under the limits that
// systems start processes with. Each case is a process of its own, whose limit it is.
#include "collectives/rendezvous/descriptors.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <vector>

#include "base/error.h"
#include "base/runtime/async.h"
#include "collectives/rendezvous/handshake.h"
#include "collectives/rendezvous/rank_address.h"
#include "collectives/rendezvous/rendezvous.h"
#include "tests/collectives/rendezvous/rendezvous_ranks.h"
#include "tests/support/child_process.h"
#include "tests/support/free_port.h"
#include "tests/support/sanitized.h"

namespace ziggurat {
namespace descriptors_test {

namespace asio = boost::asio;
using asio::ip::tcp;
using ::testing::HasSubstr;

constexpr int kRanks = 600;
constexpr rlim_t kSoft = 1024;

bool limit_to(rlim_t soft, rlim_t hard) {
  const rlimit limit{soft, hard};
  return ::setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

rlim_t hard_limit() {
  rlimit now{};
  return ::getrlimit(RLIMIT_NOFILE, &now) == 0 ? now.rlim_max : 0;
}

/// Rank `rank` of many, which has minutes to come: so many take their time.
RankOptions one_of_many(int rank, std::uint16_t port) {
  RankOptions options = options_of(rank, kRanks, port);
  options.collectives = Collectives::kTcp;
  options.connect_timeout = std::chrono::minutes(5);
  return options;
}

/// Ranks 1 to kRanks - 1 as rank 0 knows them: they join and connect to it, and to nobody else.
class OtherRanks {
 public:
  explicit OtherRanks(std::uint16_t port) : port_(port) {}

  void run() {
    const auto all = [this]() -> Task<> {
      reactor_.external_begin();
      WorkGroup group(reactor_);
      for (int rank = 1; rank < kRanks; ++rank) group.spawn(one(rank));
      co_await group.wait_idle();
      reactor_.external_end();
    };
    reactor_.block_on(all());
  }

 private:
  using SocketPtr = std::shared_ptr<tcp::socket>;

  Task<> one(int rank) {
    Caller caller{ConnectionKind::kJoin, rank, kRanks, 0};
    Session session;
    const SocketPtr socket = co_await call_until_accepted(reactor_, port_, caller, &session);
    const std::string address = RankAddress{}.to_json().dump();
    co_await write_message(*socket, session, address);
    const std::string list = co_await read_message(*socket, session, 1 << 20);
    const auto parsed = nlohmann::json::parse(list);
    caller.epoch = parsed.at("epoch").get<std::uint64_t>();
    const auto port = RankAddress::from_json(parsed.at("ranks").at(0)).port;
    for (const ConnectionKind purpose : {ConnectionKind::kControl, ConnectionKind::kBulk}) {
      caller.purpose = purpose;
      Session unused;
      const SocketPtr made = co_await call_until_accepted(reactor_, port, caller, &unused);
      held_.push_back(made);
    }
    const std::string connected = nlohmann::json({{"connected", true}}).dump();
    co_await write_message(*socket, session, connected);
    const std::string answer = co_await read_message(*socket, session, 1 << 20);
  }

  std::uint16_t port_;
  Reactor reactor_;
  std::vector<SocketPtr> held_;
};

TEST(Descriptors, SixHundredRanksConnectUnderASoftLimitOf1024) {
  if (hard_limit() < 4096) GTEST_SKIP() << "the hard limit here is " << hard_limit();
  const std::uint16_t port = free_port();
  const pid_t others = ::fork();
  if (others == 0) {
    bool done = limit_to(hard_limit(), hard_limit());
    try {
      if (done) OtherRanks(port).run();
    } catch (const std::exception&) {
      done = false;
    }
    ::_exit(done ? 0 : 1);
  }
  const std::string said = in_child_process([port] {
    if (!limit_to(kSoft, hard_limit())) return std::string("no limit could be set");
    Reactor reactor;
    const TcpOptions connected = reactor.block_on(meet_ranks(reactor, one_of_many(0, port)));
    std::size_t sockets = 0;
    for (const TcpPeer& peer : connected.peers)
      sockets += (peer.control && peer.control->is_open()) + (peer.bulk && peer.bulk->is_open());
    return fmt::format("{} sockets", sockets);
  });
  EXPECT_EQ(said, fmt::format("{} sockets", 2 * (kRanks - 1)));
  int status = 1;
  ::waitpid(others, &status, 0);
  EXPECT_EQ(status, 0) << "the other ranks were connected too";
}

TEST(Descriptors, AHardLimitThatIsTooLowIsNamedAtOnceWithTheFix) {
  const std::string said = in_child_process([] {
    if (!limit_to(kSoft, kSoft)) return std::string("no limit could be set");
    Reactor reactor;
    reactor.block_on(meet_ranks(reactor, one_of_many(5, 1)));
    return std::string("connected");
  });
  EXPECT_THAT(said, HasSubstr("rank 5 of 600 needs "));
  EXPECT_THAT(said, HasSubstr("the hard limit of this process is 1024 (RLIMIT_NOFILE)"));
  EXPECT_THAT(said, HasSubstr("ulimit -n"));
}

TEST(Descriptors, ALimitThatIsHighEnoughStaysAsItIs) {
  const std::string said = in_child_process([] {
    if (!limit_to(kSoft, hard_limit())) return std::string("no limit could be set");
    require_descriptors(0, 2);
    rlimit now{};
    return ::getrlimit(RLIMIT_NOFILE, &now) == 0 ? std::to_string(now.rlim_cur) : "unknown";
  });
  EXPECT_EQ(said, "1024");
}

// What is opened since start can use up what was there at start.
TEST(Descriptors, NoneLeftEndsTheJobAndIsNotWaitedFor) {
#ifdef ZIGGURAT_SANITIZED
  GTEST_SKIP() << "sanitizers look at memory through descriptors of their own";
#endif
  const std::uint16_t port = free_port();
  const std::string said = in_child_process([port] {
    RankOptions options = one_of_many(0, port);
    options.world_size = 2;
    Reactor reactor;
    std::vector<int> taken;
    const auto rank_0 = [&]() -> Task<> { co_await meet_ranks(reactor, options); };
    const auto caller = [&]() -> Task<> {
      boost::system::error_code error;
      tcp::socket socket(reactor.context());
      socket.open(tcp::v4(), error);
      for (int fd = ::dup(0); fd >= 0; fd = ::dup(0)) taken.push_back(fd);
      socket.connect({asio::ip::address_v4::loopback(), port}, error);
      co_return;
    };
    const auto both = [&]() -> Task<> {
      WorkGroup group(reactor);
      group.spawn(rank_0());
      group.spawn(caller());
      co_await group.wait_idle();
    };
    reactor.block_on(both());
    return std::string("connected");
  });
  EXPECT_THAT(said, HasSubstr("EMFILE"));
  EXPECT_THAT(said, HasSubstr("RLIMIT_NOFILE"));
  EXPECT_THAT(said, ::testing::Not(HasSubstr("did not come")));
}

}  // namespace descriptors_test
}  // namespace ziggurat
