// SPDX-License-Identifier: Apache-2.0
// collectives/rendezvous/rendezvous_connect.cc: finds rank 0, decides who may join, and connects a
// pair of sockets between any two ranks.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <boost/asio/connect.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <cerrno>
#include <charconv>
#include <vector>

#include "collectives/random.h"
#include "collectives/rendezvous/descriptors.h"
#include "collectives/rendezvous/rendezvous_protocol.h"

namespace ziggurat {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

void RendezvousProtocol::parse() {
  const std::string& text = options_.rendezvous;
  if (text.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("rank {} of {} ({}) does not know where rank 0 is, because the ranks "
                            "are on several hosts; set "
                            "ZIGGURAT_RENDEZVOUS=HOST:PORT to an address of rank 0's machine that "
                            "the other ranks can reach",
                            options_.rank, options_.world_size, options_.source));
  }
  const std::size_t colon = text.rfind(':');
  const char* const end = text.data() + text.size();
  const char* const port = colon == std::string::npos ? end : text.data() + colon + 1;
  const auto parsed = std::from_chars(port, end, port_);
  if (colon == 0 || parsed.ec != std::errc{} || parsed.ptr != end || port_ == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("rendezvous '{}' ({}) must be HOST:PORT, with a port from 1 to 65535",
                            text, options_.rendezvous_source));
  }
  host_ = text.substr(0, colon);
  if (host_.front() == '[' && host_.back() == ']') host_ = host_.substr(1, host_.size() - 2);
}

/// Returns whether all ranks are on this host: the launcher says so, or the address means "this
/// machine" everywhere. What a name resolves to on this machine proves nothing.
bool RendezvousProtocol::on_this_host_only() const {
  if (options_.one_host || host_ == "localhost") return true;
  error_code error;
  const asio::ip::address address = asio::ip::make_address(host_, error);
  return !error && address.is_loopback();
}

void RendezvousProtocol::require_secret() const {
  if (!options_.secret.empty() || options_.without_secret || on_this_host_only()) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format(
          "rendezvous {} can be reached from other machines, but there is no secret, so whoever "
          "connects could join the job. Set ZIGGURAT_SECRET or ZIGGURAT_SECRET_FILE alike on all "
          "ranks (an embedder gives its runtime's setting \"secret\"; openssl rand -hex 32 makes "
          "one), or ZIGGURAT_WITHOUT_SECRET=1 on a network that you trust",
          options_.rendezvous));
}

/// Rank 0's side: listens where the others join. Ranks that ask for a secret hear of the port too,
/// so theirs may be another one than the rendezvous names.
void RendezvousProtocol::invite() {
  const bool invites = options_.secret.empty() && !options_.without_secret;
  if (invites) options_.secret = random_secret();
  try {
    entrance_ = std::make_shared<Acceptor>(reactor_, listen_at(port_), options_.secret);
  } catch (const Error& error) {
    if (error.native() != EADDRINUSE) throw;
    if (!invites) {
      throw Error(error.code(),
                  fmt::format("{}; give all ranks an address with another port, "
                              "ZIGGURAT_RENDEZVOUS=HOST:PORT",
                              error.what()),
                  error.native());
    }
    entrance_ = std::make_shared<Acceptor>(reactor_, listen_at(0), options_.secret);
  }
  if (!invites) return;
  const LocalInvitation invitation{options_.secret, entrance_->address().port()};
  local_secret_ = std::make_shared<LocalSecret>(reactor_, port_, invitation);
  local_secret_->open();
}

/// The other ranks' side: gets a secret that other users of the host cannot get, if they have none.
Task<> RendezvousProtocol::find_invitation() {
  if (!options_.secret.empty() || options_.without_secret) co_return;
  for (;;) {
    const Nanoseconds left = std::max<Nanoseconds>(give_up_ - reactor_.clock().now(), {});
    const LocalInvitation invitation = co_await local_invitation(reactor_, port_, left);
    if (!invitation.secret.empty()) {
      options_.secret = invitation.secret;
      port_ = invitation.port;
      co_return;
    }
    if (reactor_.clock().now() >= give_up_) {
      throw Error(
          ErrorCode::kDeadlineExceeded,
          fmt::format("rank {} of {} waited in vain: rank 0 did not come to {} of this host",
                      options_.rank, options_.world_size, options_.rendezvous));
    }
    co_await pause();
  }
}

RendezvousProtocol::Endpoint RendezvousProtocol::listen_at(std::uint16_t port) const {
  if (!on_this_host_only()) return Acceptor::every_address(port);
  error_code error;
  const asio::ip::address address = asio::ip::make_address(host_, error);
  if (!error && address.is_loopback()) return {address, port};
  return {asio::ip::address_v4::loopback(), port};
}

void RendezvousProtocol::listen() {
  acceptor_ = std::make_shared<Acceptor>(reactor_, listen_at(0), options_.secret);
}

/// Returns every address at which rank 0 may be.
Task<std::vector<RendezvousProtocol::Endpoint>> RendezvousProtocol::resolve() {
  std::vector<Endpoint> places;
  if (on_this_host_only()) {
    places.push_back(listen_at(port_));
    co_return places;
  }
  tcp::resolver resolver(reactor_.context());
  error_code error;
  const auto found = co_await resolver.async_resolve(
      host_, std::to_string(port_), asio::redirect_error(asio::use_awaitable, error));
  if (error || found.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("rendezvous '{}' ({}): {}", options_.rendezvous,
                            options_.rendezvous_source, error.message()));
  }
  for (const auto& entry : found) places.push_back(entry.endpoint());
  co_return places;
}

Task<bool> RendezvousProtocol::call_once(SocketPtr socket, Endpoint at, Caller caller,
                                         Session* session, std::string* why_not) {
  const std::shared_ptr<void> patience =
      close_after(reactor_, socket, 2 * Acceptor::kHandshakeTime);
  error_code error;
  co_await socket->async_connect(at, asio::redirect_error(asio::use_awaitable, error));
  if (out_of_descriptors(error.value()))
    throw descriptor_error(error.value(), "cannot connect to another rank");
  if (error) {
    *why_not = error.message();
    co_return false;
  }
  std::optional<Error> refused;
  try {
    *session = co_await call_handshake(*socket, options_.secret, caller);
  } catch (const Error& failure) {
    refused = failure;
  }
  if (!refused) co_return true;
  *why_not = refused->what();
  if (refused->code() == ErrorCode::kInvalidArgument) {
    throw Error(refused->code(),
                fmt::format("rendezvous {}: {}", options_.rendezvous, refused->what()));
  }
  co_return false;
}

/// Tries every place in turn, again and again while nobody listens there yet.
Task<RendezvousProtocol::SocketPtr> RendezvousProtocol::call(std::vector<Endpoint> places,
                                                             Caller caller, Session* session) {
  std::vector<std::string> why_not(places.size());
  std::exception_ptr stranger;
  while (reactor_.clock().now() < give_up_) {
    for (std::size_t i = 0; i < places.size(); ++i) {
      check_nobody_is_lost();
      const auto socket = std::make_shared<tcp::socket>(reactor_.context());
      bool through = false;
      try {
        through = co_await call_once(socket, places[i], caller, session, &why_not[i]);
      } catch (const Error& error) {
        // The right rendezvous may be at another of these addresses.
        if (error.code() != ErrorCode::kInvalidArgument) throw;
        stranger = std::current_exception();
      }
      if (through) co_return socket;
    }
    if (stranger) std::rethrow_exception(stranger);
    co_await pause();
  }
  std::vector<std::string> tried;
  for (std::size_t i = 0; i < places.size(); ++i) {
    tried.push_back(fmt::format("{} port {}: {}", places[i].address().to_string(), places[i].port(),
                                why_not[i]));
  }
  throw Error(ErrorCode::kDeadlineExceeded,
              fmt::format("rank {} of {} cannot reach {} (rendezvous {})", options_.rank,
                          options_.world_size, fmt::join(tried, "; "), options_.rendezvous));
}

Task<> RendezvousProtocol::accepted(std::shared_ptr<RendezvousProtocol> self, SocketPtr socket,
                                    Accepted accepted) {
  const Caller& caller = accepted.caller;
  const auto rank = static_cast<std::size_t>(caller.rank);
  if (caller.purpose == ConnectionKind::kJoin || caller.epoch != self->epoch_ ||
      self->epoch_ == 0 || caller.world_size != self->options_.world_size || rank <= self->own() ||
      self->connection(rank, caller.purpose).socket) {
    co_return;
  }
  self->connection(rank, caller.purpose) = {socket, accepted.session.frames};
  if (--self->to_come_ == 0) self->all_here_.set();
}

Task<> RendezvousProtocol::call_below(std::size_t rank, ConnectionKind purpose) {
  std::vector<Endpoint> places{
      {asio::ip::make_address(addresses_[rank].address), addresses_[rank].port}};
  Session session;
  Connection made;
  made.socket = co_await call(std::move(places), as(purpose), &session);
  made.keys = session.frames;
  connection(rank, purpose) = made;
}

Task<> RendezvousProtocol::connect_all() {
  const std::size_t above = world() - 1 - own();
  to_come_ = 2 * above;
  all_here_.reset();
  if (to_come_ == 0) all_here_.set();
  acceptor_->open(
      [self = shared_from_this()](SocketPtr socket, Accepted its) {
        return accepted(self, std::move(socket), std::move(its));
      },
      fatal());
  for (std::size_t r = 0; r < own(); ++r) {
    co_await call_below(r, ConnectionKind::kControl);
    co_await call_below(r, ConnectionKind::kBulk);
  }
  const std::function<std::string()> missing = [this] {
    std::vector<std::size_t> ranks;
    for (std::size_t r = own() + 1; r < world(); ++r) {
      if (!connections_[r][0].socket || !connections_[r][1].socket) ranks.push_back(r);
    }
    return fmt::format("rank{} {} joined rank 0 but did not connect to this rank",
                       ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
  };
  co_await wait_for(all_here_, missing);
}

}  // namespace ziggurat
