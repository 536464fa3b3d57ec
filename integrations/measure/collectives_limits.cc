// SPDX-License-Identifier: Apache-2.0
// integrations/measure/collectives_limits.cc: measures plain sockets, plain messages and plain
// copies.
#include "integrations/measure/collectives_limits.h"

#include <algorithm>
#include <boost/asio/read.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <cstring>
#include <future>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/runtime/async.h"
#include "collectives/exchange/frame.h"
#include "collectives/rendezvous/rendezvous.h"
#include "integrations/measure/measurement.h"

namespace ziggurat::measure {
namespace {

constexpr std::size_t kPiece = wire::kChunkBytes;
constexpr std::size_t kPieces = 1024;  // the pieces that a rank sends
constexpr std::size_t kCopyBytes = 256 * kMiB;
constexpr int kRounds = 3;

double gb_per_s(std::size_t bytes, double seconds) {
  return static_cast<double>(bytes) / seconds / 1e9;
}

/// Asks asio for a whole piece at once, because it would otherwise stop at 64 KiB per system call.
std::size_t whole(const boost::system::error_code& error, std::size_t) {
  return error ? 0 : kPiece;
}

void send_all(TcpSocket& socket, std::size_t pieces) {
  const std::vector<std::byte> piece(kPiece);
  for (std::size_t i = 0; i < pieces; ++i) boost::asio::write(socket, boost::asio::buffer(piece));
}

void receive_all(TcpSocket& socket, std::size_t pieces) {
  std::vector<std::byte> piece(kPiece);
  for (std::size_t i = 0; i < pieces; ++i) boost::asio::read(socket, boost::asio::buffer(piece));
}

Task<> send_on_reactor(TcpSocket& socket, std::size_t pieces) {
  const std::vector<std::byte> piece(kPiece);
  for (std::size_t i = 0; i < pieces; ++i) {
    co_await boost::asio::async_write(socket, boost::asio::buffer(piece), whole,
                                      boost::asio::use_awaitable);
  }
}

Task<> receive_on_reactor(TcpSocket& socket, std::size_t pieces) {
  std::vector<std::byte> piece(kPiece);
  for (std::size_t i = 0; i < pieces; ++i) {
    co_await boost::asio::async_read(socket, boost::asio::buffer(piece), whole,
                                     boost::asio::use_awaitable);
  }
}

void exchange_on_reactor(Reactor& reactor, const std::vector<TcpSocket*>& peers,
                         std::size_t pieces) {
  const auto all = [&]() -> Task<> {
    WorkGroup group(reactor);
    for (TcpSocket* peer : peers) {
      group.spawn(send_on_reactor(*peer, pieces));
      group.spawn(receive_on_reactor(*peer, pieces));
    }
    co_await group.wait_idle();
  };
  reactor.block_on(all());
}

void exchange_on_threads(const std::vector<TcpSocket*>& peers, std::size_t pieces) {
  std::vector<std::thread> threads;
  for (TcpSocket* peer : peers) {
    peer->native_non_blocking(false);
    threads.emplace_back([=] { send_all(*peer, pieces); });
    threads.emplace_back([=] { receive_all(*peer, pieces); });
  }
  for (std::thread& thread : threads) thread.join();
}

/// Counts the pieces that arrive. The last piece ends the wait.
class Counter final : public MpiListener {
 public:
  explicit Counter(std::size_t pieces) : left_(pieces) {}
  void arrived(int, bool, MpiMessage) override {
    if (--left_ == 0) done.set_value();
  }
  void failed(const std::string& why) override {
    done.set_exception(std::make_exception_ptr(Error(ErrorCode::kUnavailable, why)));
  }
  std::promise<void> done;

 private:
  std::size_t left_;
};

/// Sends `left` messages to `to`, one after the other, each once the previous one is on its way.
void send_messages(MpiLink& link, int to, int tag, const MpiMessage& message, std::size_t left) {
  if (left == 0) return;
  link.send(to, tag, message,
            [&link, to, tag, message, left] { send_messages(link, to, tag, message, left - 1); });
}

}  // namespace

SocketLimits socket_limits(Reactor& reactor, const RankOptions& ranks) {
  const auto at = static_cast<std::size_t>(ranks.rank);
  const auto others = static_cast<std::size_t>(ranks.world_size) - 1;
  TcpOptions met = reactor.block_on(meet_ranks(reactor, ranks));
  std::vector<TcpSocket*> peers;
  for (std::size_t r = 0; r <= others; ++r) {
    if (r != at) peers.push_back(met.peers[r].bulk.get());
  }
  const std::size_t pieces = kPieces / others;
  const std::size_t bytes = pieces * others * kPiece;
  SocketLimits limits;
  const auto exchange = [&](const std::function<void()>& way) {
    for (int i = 0; i < kRounds; ++i) {
      const Nanoseconds start = monotonic_now();
      way();
      limits.exchange = std::max(limits.exchange, gb_per_s(bytes, seconds_since(start)));
    }
  };
  exchange([&] { exchange_on_reactor(reactor, peers, pieces); });
  exchange([&] { exchange_on_threads(peers, pieces); });
  for (int i = 0; i < kRounds; ++i) {
    const Nanoseconds start = monotonic_now();
    if (at == 0) send_all(*met.peers[1].bulk, kPieces);
    if (at == 1) receive_all(*met.peers[0].bulk, kPieces);
    limits.one_way = std::max(limits.one_way, gb_per_s(kPieces * kPiece, seconds_since(start)));
  }
  return limits;
}

double mpi_limit(MpiLink& link) {
  const auto others = static_cast<std::size_t>(link.world_size()) - 1;
  const std::size_t pieces = kPieces / others;
  const MpiMessage message{std::shared_ptr<std::byte[]>(new std::byte[kPiece]()), kPiece};
  const std::byte here{1};
  double best = 0;
  for (int i = 0; i < kRounds; ++i) {
    const int tag = link.next_tags();
    const auto counter = std::make_shared<Counter>(pieces * others);
    link.listen(tag, counter);
    link.gather(std::span(&here, 1), std::chrono::minutes(1));
    const Nanoseconds start = monotonic_now();
    for (int to = 0; to < link.world_size(); ++to) {
      if (to != link.rank()) send_messages(link, to, tag + 1, message, pieces);
    }
    counter->done.get_future().get();
    best = std::max(best, gb_per_s(pieces * others * kPiece, seconds_since(start)));
    link.stop_listening(tag);
  }
  return best;
}

double copy_limit(const std::function<void()>& meet) {
  std::vector<std::byte> from(kCopyBytes);
  std::vector<std::byte> to(kCopyBytes);
  double best = 0;
  for (int i = 0; i <= kRounds; ++i) {  // the first round only touches the memory
    meet();
    const Nanoseconds start = monotonic_now();
    std::memcpy(to.data(), from.data(), to.size());
    meet();
    if (i > 0) best = std::max(best, gb_per_s(kCopyBytes, seconds_since(start)));
  }
  return best;
}

}  // namespace ziggurat::measure
