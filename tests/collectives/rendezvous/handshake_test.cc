// SPDX-License-Identifier: Apache-2.0
// tests/collectives/rendezvous/handshake_test.cc: what a process without the secret gets, and what
// it can do with what it saw: nothing.
#include "collectives/rendezvous/handshake.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <functional>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/runtime/async.h"

namespace ziggurat {
namespace handshake_test {

namespace asio = boost::asio;
using asio::ip::tcp;
using ::testing::HasSubstr;

const std::string kSecret = "of this test";
constexpr Caller kRankOne{ConnectionKind::kJoin, 1, 2, 0};

/// Two ends of a connection; what happens at `ours` runs on the reactor, `theirs` is a stranger's,
/// read and written by hand.
struct Connection {
  explicit Connection(Reactor& reactor)
      : acceptor(reactor.context(), {asio::ip::address_v4::loopback(), 0}),
        ours(reactor.context()),
        theirs(strangers_context) {
    theirs.connect(acceptor.local_endpoint());
    acceptor.accept(ours);
  }
  std::vector<std::byte> read(std::size_t size) {
    std::vector<std::byte> bytes(size);
    asio::read(theirs, asio::buffer(bytes));
    return bytes;
  }
  void write(const std::vector<std::byte>& bytes) { asio::write(theirs, asio::buffer(bytes)); }

  asio::io_context strangers_context;
  tcp::acceptor acceptor;
  tcp::socket ours, theirs;
};

class Handshake : public ::testing::Test {
 protected:
  Handshake() { reactor_.start(); }

  /// Runs `task` while `stranger` does what it does; the text of its error.
  std::string error_of(const std::function<Task<>()>& task, const std::function<void()>& stranger) {
    std::string text;
    std::thread other(stranger);
    const auto guarded = [&]() -> Task<> {
      reactor_.external_begin();
      try {
        co_await task();
      } catch (const Error& error) {
        text = error.what();
      }
      reactor_.external_end();
    };
    reactor_.block_on(guarded());
    other.join();
    return text;
  }
  Task<> accept(tcp::socket& socket) {
    std::function<void()> count = [this] { ++proven_; };
    Task<Accepted> handshake = accept_handshake(socket, kSecret, count);
    co_await std::move(handshake);
  }
  Task<> call(tcp::socket& socket) { co_await call_handshake(socket, kSecret, kRankOne); }

  /// Makes both ends ours, with a session on each.
  std::pair<Session, Session> connect(Connection& connection) {
    Session caller;
    Session acceptor;
    Reactor others;
    others.start();
    tcp::socket callers(others.context());
    callers.assign(tcp::v4(), connection.theirs.release());
    std::thread other([&] {
      const auto shake = [&]() -> Task<> {
        others.external_begin();
        caller = co_await call_handshake(callers, kSecret, kRankOne);
        others.external_end();
      };
      others.block_on(shake());
    });
    const auto shake = [&]() -> Task<> {
      reactor_.external_begin();
      std::function<void()> count = [this] { ++proven_; };
      Task<Accepted> handshake = accept_handshake(connection.ours, kSecret, count);
      const Accepted accepted = co_await std::move(handshake);
      acceptor = accepted.session;
      reactor_.external_end();
    };
    reactor_.block_on(shake());
    other.join();
    connection.theirs.assign(tcp::v4(), callers.release());
    return {caller, acceptor};
  }

  Reactor reactor_;
  int proven_ = 0;
};

// Whoever limits the handshake's time ends the limit here. Were it the end of the handshake, the
// caller could hold a connection that this side has closed.
TEST_F(Handshake, TheCallerIsProvenBeforeItIsAnswered) {
  Connection connection(reactor_);
  bool closed = false;
  const std::string text = error_of(
      [&]() -> Task<> {
        std::function<void()> close = [&] {
          connection.ours.close();
          closed = true;
        };
        Task<Accepted> handshake = accept_handshake(connection.ours, kSecret, close);
        co_await std::move(handshake);
      },
      [&] {
        Reactor others;
        others.start();
        tcp::socket callers(others.context());
        callers.assign(tcp::v4(), connection.theirs.release());
        EXPECT_THROW(others.block_on(call(callers)), Error) << "it was answered";
      });
  EXPECT_TRUE(closed);
  EXPECT_THAT(text, HasSubstr("ended during the handshake"));
}

constexpr std::size_t kHelloBytes = 64;
constexpr std::size_t kDigestBytes = 32;

/// The first bytes that a rank of this version sends.
std::vector<std::byte> hello() {
  Reactor reactor;
  reactor.start();
  Connection connection(reactor);
  std::vector<std::byte> bytes;
  std::thread stranger([&] {
    bytes = connection.read(kHelloBytes);
    connection.theirs.close();
  });
  const auto calls = [&]() -> Task<> {
    reactor.external_begin();
    try {
      co_await call_handshake(connection.ours, "unknown", kRankOne);
    } catch (const Error&) {  // the other side is gone: it has what it wanted
    }
    reactor.external_end();
  };
  reactor.block_on(calls());
  stranger.join();
  return bytes;
}

// With it, a stranger could guess secrets at home for as long as it likes.
TEST_F(Handshake, AStrangerGetsNothingThatTheSecretMade) {
  Connection connection(reactor_);
  std::vector<std::byte> nonce;
  std::vector<std::byte> answer;
  const std::string text = error_of([&] { return accept(connection.ours); },
                                    [&] {
                                      connection.write(hello());
                                      nonce = connection.read(kDigestBytes);
                                      connection.write(std::vector<std::byte>(kDigestBytes));
                                      answer = connection.read(kDigestBytes);
                                    });
  EXPECT_THAT(text, HasSubstr("rank 1 does not know the secret"));
  EXPECT_THAT(answer, ::testing::Each(std::byte{0}));
  EXPECT_EQ(proven_, 0);
}

TEST_F(Handshake, ACallersOwnProofSentBackIsRefused) {
  Connection connection(reactor_);
  const std::string text = error_of([&] { return call(connection.ours); },
                                    [&] {
                                      connection.read(kHelloBytes);
                                      connection.write(std::vector<std::byte>(kDigestBytes));
                                      connection.write(connection.read(kDigestBytes));
                                    });
  EXPECT_THAT(text, HasSubstr("does not know this job's secret"));
}

TEST_F(Handshake, BothSidesHaveTheSameKeysEachTheOthersWayRound) {
  Connection connection(reactor_);
  const auto [caller, acceptor] = connect(connection);
  EXPECT_EQ(caller.frames.send, acceptor.frames.receive);
  EXPECT_EQ(caller.frames.receive, acceptor.frames.send);
  EXPECT_NE(caller.frames.send, caller.frames.receive);
  EXPECT_EQ(proven_, 1);
}

TEST_F(Handshake, AMessageSentBackToItsSenderIsRefused) {
  Connection connection(reactor_);
  auto [caller, acceptor] = connect(connection);
  const std::string told = "the list of all ranks";
  const auto exchange = [&]() -> Task<> {
    co_await write_message(connection.ours, acceptor, told);
    co_await read_message(connection.ours, acceptor, 100);
  };
  const std::string text = error_of(exchange, [&] {
    connection.write(connection.read(sizeof(std::uint32_t) + told.size() + kDigestBytes));
  });
  EXPECT_THAT(text, HasSubstr("a message has a wrong signature"));
}

TEST_F(Handshake, AMessageThatComesTwiceIsRefused) {
  Connection first(reactor_);
  auto [caller, acceptor] = connect(first);
  const std::string told = "connected";
  Session sender = caller;
  const auto send = [&](Session& session) -> Task<> {
    co_await write_message(first.ours, session, told);
  };
  // Written with the caller's keys, so that it reads as the caller's.
  const std::string text = error_of(
      [&]() -> Task<> {
        co_await send(sender);
        const std::string once = co_await read_message(first.ours, acceptor, 100);
        EXPECT_EQ(once, told);
        co_await read_message(first.ours, acceptor, 100);
      },
      [&] {
        const auto bytes = first.read(sizeof(std::uint32_t) + told.size() + kDigestBytes);
        first.write(bytes);
        first.write(bytes);
      });
  EXPECT_THAT(text, HasSubstr("a message has a wrong signature"));
}

}  // namespace handshake_test
}  // namespace ziggurat
