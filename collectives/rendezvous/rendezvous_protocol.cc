// SPDX-License-Identifier: Apache-2.0
// collectives/rendezvous/rendezvous_protocol.cc: joins, waits for the other ranks, and parts.
#include "collectives/rendezvous/rendezvous_protocol.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <nlohmann/json.hpp>
#include <vector>

#include "collectives/random.h"

namespace ziggurat {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;
using nlohmann::json;

namespace {

constexpr std::size_t kMessageBytes = 512;  // for one rank; a list of all ranks may have as many
                                            // for each
constexpr Nanoseconds kRetry = std::chrono::milliseconds(20);
constexpr Nanoseconds kVerdict = std::chrono::seconds(1);  // for rank 0 to name the ranks that did
                                                           // not come

/// Formats a list: "ranks 2, 3".
std::string ranks_text(const std::vector<std::size_t>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

/// Returns an address that the other ranks can use; empty for a loopback address.
std::string reachable(const asio::ip::address& seen) {
  const asio::ip::address plain =
      seen.is_v6() && seen.to_v6().is_v4_mapped()
          ? asio::ip::address(asio::ip::make_address_v4(asio::ip::v4_mapped, seen.to_v6()))
          : seen;
  return plain.is_loopback() ? std::string() : plain.to_string();
}

}  // namespace

RendezvousProtocol::RendezvousProtocol(Reactor& reactor, RankOptions options)
    : reactor_(reactor),
      options_(std::move(options)),
      addresses_(world()),
      connections_(world()),
      give_up_(reactor.clock().now() + options_.connect_timeout) {
  if (options_.through_memory()) readable_ = allow_reading();
}

RankAddress RendezvousProtocol::own_address() const {
  return {"", acceptor_->address().port(), this_host(),
          options_.through_memory() ? own_memory_probe() : MemoryProbe{}};
}

Task<> RendezvousProtocol::pause() {
  const auto over = std::make_shared<Signal>(reactor_);
  reactor_.clock().after(kRetry, [over] { over->set(); });
  co_await over->wait();
}

void RendezvousProtocol::check_nobody_is_lost() const {
  if (fatal_) {
    throw Error(fatal_->code(),
                fmt::format("rank {} of {} at {}: {}", options_.rank, options_.world_size,
                            options_.rendezvous, fatal_->what()));
  }
  if (lost_.empty()) return;
  throw Error(ErrorCode::kUnavailable,
              fmt::format("rank {} of {} at {}: {}", options_.rank, options_.world_size,
                          options_.rendezvous, lost_));
}

std::function<void(const Error&)> RendezvousProtocol::fatal() {
  return [weak = weak_from_this()](const Error& error) {
    if (const auto self = weak.lock()) self->fatal_ = error;
  };
}

Task<> RendezvousProtocol::wait_for(Signal& signal, const std::function<std::string()>& what) {
  while (!signal.is_set()) {
    check_nobody_is_lost();
    if (reactor_.clock().now() >= give_up_) {
      throw Error(
          ErrorCode::kDeadlineExceeded,
          fmt::format(
              "rank {} of {} at {}: {} within {} s", options_.rank, options_.world_size,
              options_.rendezvous, what(),
              std::chrono::duration_cast<std::chrono::seconds>(options_.connect_timeout).count()));
    }
    co_await pause();
  }
}

Task<> RendezvousProtocol::wait_for_all_to_join() {
  const std::function<std::string()> missing = [this] {
    std::vector<std::size_t> ranks;
    for (std::size_t r = 1; r < world(); ++r) {
      if (!members_[r]) ranks.push_back(r);
    }
    return ranks_text(ranks) + " did not come";
  };
  co_await wait_for(all_here_, missing);
}

/// Does rank 0's part: lets all ranks join, then sends each the addresses of all.
Task<> RendezvousProtocol::lead() {
  members_.resize(world());
  to_come_ = world() - 1;
  invite();
  listen();
  addresses_[0] = own_address();
  entrance_->open(
      [self = shared_from_this()](SocketPtr socket, Accepted accepted) {
        return joined(self, std::move(socket), std::move(accepted));
      },
      fatal());
  std::exception_ptr failure;
  try {
    co_await wait_for_all_to_join();
  } catch (...) {
    failure = std::current_exception();
  }
  entrance_->close();
  if (failure) std::rethrow_exception(failure);
  do {
    epoch_ = random_number();
  } while (epoch_ == 0);
  json rows = json::array();
  for (const RankAddress& address : addresses_) rows.push_back(address.to_json());
  const std::string list = json({{"epoch", epoch_}, {"ranks", rows}}).dump();
  for (std::size_t r = 1; r < world(); ++r) {
    co_await write_message(*members_[r]->socket, members_[r]->session, list);
  }
}

/// Returns why `caller` may not join; empty if it may.
std::string RendezvousProtocol::refusal(const Caller& caller) const {
  if (caller.purpose != ConnectionKind::kJoin || caller.world_size != options_.world_size) {
    return fmt::format(
        "rank {} says that there are {} ranks, but rank 0 says {}; start all ranks with the same "
        "count",
        caller.rank, caller.world_size, options_.world_size);
  }
  if (caller.rank == 0 || members_[static_cast<std::size_t>(caller.rank)]) {
    return fmt::format(
        "a process with rank {} has joined already; give every process a number of its own",
        caller.rank);
  }
  return {};
}

Task<> RendezvousProtocol::joined(std::shared_ptr<RendezvousProtocol> self, SocketPtr socket,
                                  Accepted accepted) {
  const auto rank = static_cast<std::size_t>(accepted.caller.rank);
  const auto member = std::make_shared<Member>(Member{rank, socket, accepted.session});
  const auto patience = close_after(self->reactor_, socket, Acceptor::kHandshakeTime);
  const std::string text = co_await read_message(*socket, member->session, kMessageBytes);
  if (const std::string why = self->refusal(accepted.caller); !why.empty()) {
    const std::string answer = json({{"error", why}}).dump();
    co_await write_message(*socket, member->session, answer);
    co_return;
  }
  error_code error;
  const tcp::endpoint remote = socket->remote_endpoint(error);
  if (error) co_return;
  self->addresses_[rank] = RankAddress::from_json(json::parse(text));
  self->addresses_[rank].address = reachable(remote.address());
  self->members_[rank] = member;
  asio::co_spawn(self->reactor_.context(), watch(self, member), asio::detached);
  if (--self->to_come_ == 0) self->all_here_.set();
}

/// Waits for a member's next message, which says that it is connected to all ranks; rank 0's says
/// that all are. If the socket closes instead, that rank has ended, and nobody needs to wait for
/// it.
Task<> RendezvousProtocol::watch(std::shared_ptr<RendezvousProtocol> self, MemberPtr member) {
  try {
    const std::string text = co_await read_message(*member->socket, member->session, kMessageBytes);
    if (const json message = json::parse(text); message.contains("lost"))
      self->lost_ = message["lost"].get<std::string>();
    member->connected = true;
  } catch (const std::exception& error) {
    if (!self->over_ && self->lost_.empty()) {
      self->lost_ = fmt::format("rank {} went away before all ranks were connected ({})",
                                member->rank, error.what());
    }
  }
  if (std::ranges::all_of(self->members_,
                          [](const MemberPtr& its) { return !its || its->connected; }))
    self->all_connected_.set();
}

Task<> RendezvousProtocol::join() {
  const auto leader = std::make_shared<Member>(Member{0, nullptr, {}});
  co_await find_invitation();
  std::vector<Endpoint> places = co_await resolve();
  leader->socket = co_await call(std::move(places), as(ConnectionKind::kJoin), &leader->session);
  const std::string rank_0 = leader->socket->remote_endpoint().address().to_string();
  listen();
  const std::string row = own_address().to_json().dump();
  co_await write_message(*leader->socket, leader->session, row);
  const Nanoseconds left = std::max<Nanoseconds>(give_up_ - reactor_.clock().now(), {});
  const auto patience = close_after(reactor_, leader->socket, left + kVerdict);
  const std::string text =
      co_await read_message(*leader->socket, leader->session, kMessageBytes * world());
  const json list = json::parse(text);
  if (list.contains("error")) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("rendezvous {}: {}", options_.rendezvous,
                                                         list["error"].get<std::string>()));
  }
  if (list.contains("lost")) lost_ = list["lost"].get<std::string>();
  check_nobody_is_lost();
  epoch_ = list.at("epoch").get<std::uint64_t>();
  for (std::size_t r = 0; r < world(); ++r) {
    addresses_[r] = RankAddress::from_json(list.at("ranks").at(r));
    if (addresses_[r].address.empty()) addresses_[r].address = rank_0;
  }
  members_ = {leader};
  asio::co_spawn(reactor_.context(), watch(shared_from_this(), leader), asio::detached);
}

/// Waits until all ranks are connected. Until then, rank 0 notices a rank that ends, and tells all.
Task<> RendezvousProtocol::part() {
  const std::string connected = json({{"connected", true}}).dump();
  if (own() != 0) co_await write_message(*members_[0]->socket, members_[0]->session, connected);
  const std::function<std::string()> missing = [this] {
    std::vector<std::size_t> ranks;
    for (const MemberPtr& member : members_) {
      if (member && !member->connected) ranks.push_back(member->rank);
    }
    return ranks_text(ranks) + " joined but did not report that they are connected to all others";
  };
  co_await wait_for(all_connected_, missing);
  check_nobody_is_lost();
  if (own() != 0) co_return;
  for (const MemberPtr& member : members_) {
    if (member) co_await write_message(*member->socket, member->session, connected);
  }
}

/// Tells the failure: rank 0 tells all ranks, and the others close their connection to rank 0.
Task<> RendezvousProtocol::end_for_all(const std::exception_ptr& failure) {
  std::string why = lost_;
  try {
    if (failure) std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    if (why.empty()) why = error.what();
  }
  over_ = true;
  for (const MemberPtr& member : members_) {
    if (!member) continue;
    try {
      const std::string text = json({{"lost", why.substr(0, kMessageBytes / 2)}}).dump();
      if (failure && own() == 0) co_await write_message(*member->socket, member->session, text);
    } catch (const Error&) {
      // This member is the one that has gone, or it will notice the closed connection.
    }
    error_code ignored;  // the socket is released whatever close() returns
    member->socket->close(ignored);
  }
}

Task<TcpOptions> RendezvousProtocol::run() {
  parse();
  require_secret();
  std::exception_ptr failure;
  try {
    if (own() == 0) {
      co_await lead();
    } else {
      co_await join();
    }
    co_await connect_all();
    co_await part();
  } catch (...) {
    failure = std::current_exception();
  }
  if (acceptor_) acceptor_->close();
  if (local_secret_) local_secret_->close();
  co_await end_for_all(failure);
  if (failure) std::rethrow_exception(failure);
  co_return connected();
}

TcpOptions RendezvousProtocol::connected() {
  const bool over_a_network = std::ranges::any_of(addresses_, [this](const RankAddress& address) {
    return address.host != addresses_[own()].host;
  });
  const bool sealed = over_a_network && !options_.secret.empty();
  TcpOptions connected;
  connected.rank = options_.rank;
  connected.epoch = epoch_;
  connected.timeout = options_.call_timeout;
  connected.readable = std::move(readable_);
  connected.peers.resize(world());
  for (std::size_t r = 0; r < world(); ++r) {
    TcpPeer& peer = connected.peers[r];
    peer.host = addresses_[r].host;
    if (options_.through_memory()) peer.memory = addresses_[r].memory;
    if (sealed) peer.payload_key = payload_key(options_.secret, epoch_, static_cast<int>(r));
    if (r == own()) continue;
    auto& [control, bulk] = connections_[r];
    peer.control = std::make_unique<TcpSocket>(std::move(*control.socket));
    peer.bulk = std::make_unique<TcpSocket>(std::move(*bulk.socket));
    if (!sealed) continue;
    peer.control_keys = control.keys;
    peer.bulk_keys = bulk.keys;
  }
  return connected;
}

}  // namespace ziggurat
