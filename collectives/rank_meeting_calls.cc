// SPDX-License-Identifier: Apache-2.0
// collectives/rank_meeting_calls.cc: finding rank 0, and a pair of sockets between any two.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <boost/asio/connect.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <vector>

#include "base/error.h"
#include "collectives/rank_meeting.h"

namespace ziggurat {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

Task<tcp::endpoint> RankMeeting::resolve() {
  const std::string& text = options_.rendezvous;
  const std::size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == text.size()) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("rendezvous '{}' ({}): must be HOST:PORT",
                                                         text, options_.rendezvous_source));
  }
  std::string host = text.substr(0, colon);
  const std::string port = text.substr(colon + 1);
  if (host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  tcp::resolver resolver(reactor_.context());
  error_code error;
  const auto found =
      co_await resolver.async_resolve(host, port, asio::redirect_error(asio::use_awaitable, error));
  if (error || found.empty()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("rendezvous '{}' ({}): {}", text, options_.rendezvous_source, error.message()));
  }
  const tcp::endpoint at = found.begin()->endpoint();
  check_secret(at);
  co_return at;
}

void RankMeeting::check_secret(const tcp::endpoint& at) const {
  if (!options_.secret.empty() || options_.without_secret || at.address().is_loopback()) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("rendezvous {} can be reached from other machines, and there is no secret: "
                  "whoever connects could join the job. Set ZIGGURAT_SECRET or "
                  "ZIGGURAT_SECRET_FILE alike on all ranks, or ZIGGURAT_WITHOUT_SECRET=1 "
                  "on a network that you trust",
                  options_.rendezvous));
}

/// Tries again while nobody listens there yet.
Task<RankMeeting::SocketPtr> RankMeeting::call(const tcp::endpoint& at, Introduction introduction,
                                               Conversation* conversation) {
  std::string last;
  while (reactor_.clock().now() < give_up_) {
    check_nobody_is_lost();
    const auto socket = std::make_shared<tcp::socket>(reactor_.context());
    const std::shared_ptr<void> patience = close_after(reactor_, socket, 2 * Doorman::kPatience);
    error_code error;
    co_await socket->async_connect(at, asio::redirect_error(asio::use_awaitable, error));
    last = error.message();
    bool wrong_secret = false;
    if (!error) {
      try {
        *conversation = co_await introduce(*socket, options_.secret, introduction);
        co_return socket;
      } catch (const Error& refused) {
        last = refused.what();
        wrong_secret = refused.code() == ErrorCode::kInvalidArgument;
      }
    }
    if (wrong_secret) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("rendezvous {}: {}", options_.rendezvous, last));
    }
    co_await pause();
  }
  throw Error(ErrorCode::kDeadlineExceeded,
              fmt::format("rank {} of {} cannot reach {}:{} (rendezvous {}): {}", options_.rank,
                          options_.world_size, at.address().to_string(), at.port(),
                          options_.rendezvous, last));
}

Task<> RankMeeting::called(std::shared_ptr<RankMeeting> self, SocketPtr socket, Guest guest) {
  const Introduction& from = guest.first;
  const auto rank = static_cast<std::size_t>(from.rank);
  if (from.errand == Errand::kJoin || from.epoch != self->epoch_ || self->epoch_ == 0 ||
      from.world_size != self->options_.world_size || rank <= self->own() ||
      self->socket_of(rank, from.errand)) {
    co_return;
  }
  self->socket_of(rank, from.errand) = socket;
  if (--self->to_come_ == 0) self->all_here_.set();
}

Task<> RankMeeting::call_below(std::size_t rank, Errand errand) {
  const tcp::endpoint at(asio::ip::make_address(rows_[rank].address), rows_[rank].port);
  Conversation conversation;
  socket_of(rank, errand) = co_await call(at, as(errand), &conversation);
}

Task<> RankMeeting::connect_all() {
  const std::size_t above = world() - 1 - own();
  to_come_ = 2 * above;
  all_here_.reset();
  if (to_come_ == 0) all_here_.set();
  doorman_->open([self = shared_from_this()](SocketPtr socket, Guest guest) {
    return called(self, std::move(socket), std::move(guest));
  });
  for (std::size_t r = 0; r < own(); ++r) {
    co_await call_below(r, Errand::kControl);
    co_await call_below(r, Errand::kBulk);
  }
  const std::function<std::string()> missing = [this] {
    std::vector<std::size_t> ranks;
    for (std::size_t r = own() + 1; r < world(); ++r) {
      if (!sockets_[r][0] || !sockets_[r][1]) ranks.push_back(r);
    }
    return fmt::format("rank{} {} met rank 0, and did not connect here",
                       ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
  };
  co_await wait_for(all_here_, missing);
}

}  // namespace ziggurat
