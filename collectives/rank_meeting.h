// SPDX-License-Identifier: Apache-2.0
// collectives/rank_meeting.h: how ranks find each other: all come to rank 0, which tells everybody
// of all; then each connects to those below it; then they part. Private to collectives.
//
//   rank r > 0                      rank 0
//   row: where I listen        ->   waits for all rows
//                              <-   all rows, and the epoch
//   two sockets to each rank below, two from each above
//   connected                  ->   waits for all
//                              <-   connected: nobody waits for anybody any more
//
// Until the end each watches its connection to rank 0, and rank 0 all of them: a rank that ends is
// missed by everybody at once, as it is once they are connected.
#pragma once

#include <array>
#include <boost/asio/ip/tcp.hpp>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/runtime/async.h"
#include "collectives/doorman.h"
#include "collectives/rank_options.h"
#include "collectives/rank_row.h"
#include "collectives/tcp_transport.h"

namespace ziggurat {

/// Of one rank, once.
class RankMeeting : public std::enable_shared_from_this<RankMeeting> {
 public:
  using SocketPtr = std::shared_ptr<boost::asio::ip::tcp::socket>;
  using Endpoint = boost::asio::ip::tcp::endpoint;

  RankMeeting(Reactor& reactor, RankOptions options)
      : reactor_(reactor),
        options_(std::move(options)),
        rows_(world()),
        give_up_(reactor.clock().now() + options_.connect_timeout) {
    sockets_.resize(world());
  }

  Task<TcpOptions> run();

 private:
  /// The connection to rank 0, or of rank 0 to another, for as long as ranks meet.
  struct Visitor {
    std::size_t rank;
    SocketPtr socket;
    Conversation conversation;
    bool connected = false;  ///< has a connection to every other rank, it says
  };
  using VisitorPtr = std::shared_ptr<Visitor>;

  std::size_t world() const { return static_cast<std::size_t>(options_.world_size); }
  std::size_t own() const { return static_cast<std::size_t>(options_.rank); }
  RankRow own_row() const {
    return {"", doorman_->address().port(), this_host(),
            options_.through_memory ? own_memory_probe() : MemoryProbe{}};
  }
  Introduction as(Errand errand) const {
    return {errand, options_.rank, options_.world_size, epoch_};
  }

  Task<Endpoint> resolve();
  Task<> host(const Endpoint& at);
  // By shared pointer: who is still being welcomed when the meeting is over holds on to it.
  static Task<> joined(std::shared_ptr<RankMeeting> self, SocketPtr socket, Guest guest);
  Task<> join(const Endpoint& at);
  Task<SocketPtr> call(const Endpoint& at, Introduction introduction, Conversation* conversation);
  static Task<> called(std::shared_ptr<RankMeeting> self, SocketPtr socket, Guest guest);
  Task<> call_below(std::size_t rank, Errand errand);
  Task<> connect_all();
  Task<> part();
  static Task<> watch(std::shared_ptr<RankMeeting> self, VisitorPtr visitor);
  Task<> end_for_all(const std::exception_ptr& failure);
  void check_secret(const Endpoint& at) const;
  Task<> pause();
  void check_nobody_is_lost() const;
  Task<> wait_for(Signal& signal, const std::function<std::string()>& what);
  SocketPtr& socket_of(std::size_t rank, Errand errand) {
    return sockets_[rank][errand == Errand::kControl ? 0 : 1];
  }

  Reactor& reactor_;
  RankOptions options_;
  std::vector<RankRow> rows_;
  std::vector<std::array<SocketPtr, 2>> sockets_;  // control, bulk
  std::vector<VisitorPtr> visitors_;               // of rank 0: the others; of the others: rank 0
  std::size_t to_come_ = 0;
  Signal all_here_{reactor_};
  Signal all_connected_{reactor_};
  std::string lost_;  // who went away, and how that is known
  bool over_ = false;
  std::shared_ptr<Doorman> doorman_;
  std::uint64_t epoch_ = 0;
  Nanoseconds give_up_;
};

}  // namespace ziggurat
