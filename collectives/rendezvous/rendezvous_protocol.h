// SPDX-License-Identifier: Apache-2.0
// collectives/rendezvous/rendezvous_protocol.h: how ranks meet: all join rank 0, which sends each
// the list of all; then each connects to the ranks below it; then they part. Private to
// collectives.
//
//   rank r > 0                      rank 0
//   address: where I listen    ->   waits for all addresses
//                              <-   all addresses, and the epoch
//   two sockets to each rank below, two from each above
//   connected                  ->   waits for all
//                              <-   connected: no rank waits any more
//
// Until the end each rank watches its connection to rank 0, and rank 0 watches all of them. So all
// ranks notice at once a rank that ends, as they do later when they are connected.
//
// Ranks of one host use loopback. Otherwise each rank listens on every address of its machine,
// because the address that a host finds for its own name (127.0.1.1 on Debian) does not say how
// others reach it.
#pragma once

#include <array>
#include <boost/asio/ip/tcp.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/runtime/async.h"
#include "collectives/rank_options.h"
#include "collectives/rendezvous/acceptor.h"
#include "collectives/rendezvous/local_secret.h"
#include "collectives/rendezvous/rank_address.h"
#include "collectives/tcp/tcp_channel.h"

namespace ziggurat {

/// One rank's part in one meeting.
class RendezvousProtocol : public std::enable_shared_from_this<RendezvousProtocol> {
 public:
  RendezvousProtocol(Reactor& reactor, RankOptions options);

  Task<TcpOptions> run();

 private:
  using SocketPtr = std::shared_ptr<boost::asio::ip::tcp::socket>;
  using Endpoint = boost::asio::ip::tcp::endpoint;

  /// The connection to rank 0, or from rank 0 to another rank, until all ranks are connected.
  struct Member {
    std::size_t rank;
    SocketPtr socket;
    Session session;
    bool connected = false;  ///< the member says that it is connected to every other rank
  };
  using MemberPtr = std::shared_ptr<Member>;
  struct Connection {
    SocketPtr socket;
    wire::ConnectionKeys keys;
  };

  std::size_t world() const { return static_cast<std::size_t>(options_.world_size); }
  std::size_t own() const { return static_cast<std::size_t>(options_.rank); }
  RankAddress own_address() const;
  Caller as(ConnectionKind purpose) const {
    return {purpose, options_.rank, options_.world_size, epoch_};
  }

  void parse();
  bool on_this_host_only() const;
  void require_secret() const;
  void invite();
  Task<> find_invitation();
  Task<std::vector<Endpoint>> resolve();
  Endpoint listen_at(std::uint16_t port) const;
  void listen();
  std::function<void(const Error&)> fatal();

  Task<> lead();
  Task<> wait_for_all_to_join();
  // These functions take a shared pointer, because a handshake that is under way when the
  // rendezvous ends still uses the object.
  static Task<> joined(std::shared_ptr<RendezvousProtocol> self, SocketPtr socket,
                       Accepted accepted);
  std::string refusal(const Caller& caller) const;
  Task<> join();
  Task<SocketPtr> call(std::vector<Endpoint> places, Caller caller, Session* session);
  Task<bool> call_once(SocketPtr socket, Endpoint at, Caller caller, Session* session,
                       std::string* why_not);
  static Task<> accepted(std::shared_ptr<RendezvousProtocol> self, SocketPtr socket,
                         Accepted accepted);
  Task<> call_below(std::size_t rank, ConnectionKind purpose);
  Task<> connect_all();
  Task<> part();
  static Task<> watch(std::shared_ptr<RendezvousProtocol> self, MemberPtr member);
  Task<> end_for_all(const std::exception_ptr& failure);
  TcpOptions connected();
  Task<> pause();
  void check_nobody_is_lost() const;
  Task<> wait_for(Signal& signal, const std::function<std::string()>& what);
  Connection& connection(std::size_t rank, ConnectionKind purpose) {
    return connections_[rank][purpose == ConnectionKind::kControl ? 0 : 1];
  }

  Reactor& reactor_;
  RankOptions options_;
  std::string host_;  // host of the rendezvous
  std::uint16_t port_ = 0;
  std::vector<RankAddress> addresses_;
  std::vector<std::array<Connection, 2>> connections_;  // control, bulk
  std::vector<MemberPtr> members_;  // on rank 0: all other ranks; on other ranks: rank 0
  std::size_t to_come_ = 0;
  Signal all_here_{reactor_};
  Signal all_connected_{reactor_};
  std::string lost_;            // which rank went away, and how that was noticed
  std::optional<Error> fatal_;  // an error after which this rank cannot go on
  bool over_ = false;
  std::shared_ptr<Acceptor> entrance_;  // rank 0's: where the others join
  std::shared_ptr<Acceptor> acceptor_;  // accepts connections between ranks
  std::shared_ptr<LocalSecret> local_secret_;
  std::shared_ptr<const void> readable_;
  std::uint64_t epoch_ = 0;
  Nanoseconds give_up_;
};

}  // namespace ziggurat
