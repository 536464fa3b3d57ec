// SPDX-License-Identifier: Apache-2.0
// tests/collectives/rendezvous/descriptors_test.cc: jobs of hundreds of ranks under the limits that
// systems start processes with. Each case is a process of its own, whose limit it is.
#include "collectives/rendezvous/descriptors.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "base/error.h"
#include "base/runtime/async.h"
#include "collectives/rendezvous/handshake.h"
#include "collectives/rendezvous/rank_address.h"
#include "collectives/rendezvous/rendezvous.h"

namespace ziggurat {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using testing::HasSubstr;

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

/// Runs `body` in a child process; what it returned.
std::string in_a_process(const std::function<std::string()>& body) {
  int ends[2];
  if (::pipe(ends) != 0) return "no pipe";
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(ends[0]);
    std::string text;
    try {
      text = body();
    } catch (const std::exception& error) {
      text = error.what();
    }
    const bool written = ::write(ends[1], text.data(), text.size()) >= 0;
    ::_exit(written ? 0 : 1);
  }
  ::close(ends[1]);
  std::string text;
  char buffer[512];
  for (ssize_t n = 0; (n = ::read(ends[0], buffer, sizeof(buffer))) > 0;)
    text.append(buffer, static_cast<std::size_t>(n));
  ::close(ends[0]);
  ::waitpid(child, nullptr, 0);
  return text;
}

std::uint16_t free_port() {
  asio::io_context context;
  return tcp::acceptor(context, tcp::endpoint(asio::ip::address_v4::loopback(), 0))
      .local_endpoint()
      .port();
}

RankOptions options_of(int rank, std::uint16_t port) {
  RankOptions options;
  options.rank = rank;
  options.world_size = kRanks;
  options.rendezvous = "127.0.0.1:" + std::to_string(port);
  options.secret = "a secret of this test";
  options.collectives = Collectives::kTcp;
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

  /// Tries until it is let in: rank 0 does not listen yet, or has as many handshakes as it takes.
  Task<SocketPtr> call(std::uint16_t port, Caller caller, Session* session) {
    for (;;) {
      const auto socket = std::make_shared<tcp::socket>(reactor_.context());
      boost::system::error_code error;
      co_await socket->async_connect({asio::ip::address_v4::loopback(), port},
                                     asio::redirect_error(asio::use_awaitable, error));
      bool through = false;
      try {
        if (!error) *session = co_await call_handshake(*socket, "a secret of this test", caller);
        through = !error;
      } catch (const Error&) {
      }
      if (through) co_return socket;
      const auto pause = std::make_shared<Signal>(reactor_);
      reactor_.clock().after(std::chrono::milliseconds(20), [pause] { pause->set(); });
      co_await pause->wait();
    }
  }

  Task<> one(int rank) {
    Caller caller{ConnectionKind::kJoin, rank, kRanks, 0};
    Session session;
    const SocketPtr socket = co_await call(port_, caller, &session);
    const std::string address = RankAddress{}.to_json().dump();
    co_await write_message(*socket, session, address);
    const std::string list = co_await read_message(*socket, session, 1 << 20);
    const auto parsed = nlohmann::json::parse(list);
    caller.epoch = parsed.at("epoch").get<std::uint64_t>();
    const auto port = RankAddress::from_json(parsed.at("ranks").at(0)).port;
    for (const ConnectionKind purpose : {ConnectionKind::kControl, ConnectionKind::kBulk}) {
      caller.purpose = purpose;
      Session unused;
      const SocketPtr made = co_await call(port, caller, &unused);
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
  const std::string said = in_a_process([port] {
    if (!limit_to(kSoft, hard_limit())) return std::string("no limit could be set");
    Reactor reactor;
    const TcpOptions connected = reactor.block_on(meet_ranks(reactor, options_of(0, port)));
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
  const std::string said = in_a_process([] {
    if (!limit_to(kSoft, kSoft)) return std::string("no limit could be set");
    Reactor reactor;
    reactor.block_on(meet_ranks(reactor, options_of(5, 1)));
    return std::string("connected");
  });
  EXPECT_THAT(said, HasSubstr("rank 5 of 600 needs "));
  EXPECT_THAT(said, HasSubstr("the hard limit of this process is 1024 (RLIMIT_NOFILE)"));
  EXPECT_THAT(said, HasSubstr("ulimit -n"));
}

TEST(Descriptors, ALimitThatIsHighEnoughStaysAsItIs) {
  const std::string said = in_a_process([] {
    if (!limit_to(kSoft, hard_limit())) return std::string("no limit could be set");
    require_descriptors(0, 2);
    rlimit now{};
    return ::getrlimit(RLIMIT_NOFILE, &now) == 0 ? std::to_string(now.rlim_cur) : "unknown";
  });
  EXPECT_EQ(said, "1024");
}

// What is opened since start can use up what was there at start.
TEST(Descriptors, NoneLeftEndsTheJobAndIsNotWaitedFor) {
  const std::uint16_t port = free_port();
  const std::string said = in_a_process([port] {
    RankOptions options = options_of(0, port);
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
  EXPECT_THAT(said, testing::Not(HasSubstr("did not come")));
}

}  // namespace
}  // namespace ziggurat
