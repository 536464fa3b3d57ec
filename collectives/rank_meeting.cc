// SPDX-License-Identifier: Apache-2.0
// collectives/rank_meeting.cc: coming, waiting for the others, and parting.
#include "collectives/rank_meeting.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/error.h"

namespace ziggurat {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;
using nlohmann::json;

namespace {
constexpr std::size_t kMessageBytes = 512;  // and of all ranks, as many for each
constexpr Nanoseconds kRetry = std::chrono::milliseconds(20);
constexpr Nanoseconds kVerdict = std::chrono::seconds(1);  // for rank 0 to say who did not come
}  // namespace

Task<> RankMeeting::pause() {
  const auto over = std::make_shared<Signal>(reactor_);
  reactor_.clock().after(kRetry, [over] { over->set(); });
  co_await over->wait();
}

void RankMeeting::check_nobody_is_lost() const {
  if (lost_.empty()) return;
  throw Error(ErrorCode::kUnavailable,
              fmt::format("rank {} of {} at {}: {}", options_.rank, options_.world_size,
                          options_.rendezvous, lost_));
}

Task<> RankMeeting::wait_for(Signal& signal, const std::function<std::string()>& what) {
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

/// Rank 0: takes everybody in, then tells everybody of all.
Task<> RankMeeting::host(const tcp::endpoint& at) {
  visitors_.resize(world());
  to_come_ = world() - 1;
  const auto door = std::make_shared<Doorman>(reactor_, at, options_.secret);
  const tcp::endpoint any(at.address(), 0);
  doorman_ = std::make_shared<Doorman>(reactor_, any, options_.secret);
  rows_[0] = own_row();
  door->open([self = shared_from_this()](SocketPtr socket, Guest guest) {
    return joined(self, std::move(socket), std::move(guest));
  });
  std::exception_ptr failure;
  try {
    const std::function<std::string()> missing = [this] {
      std::vector<std::size_t> ranks;
      for (std::size_t r = 1; r < world(); ++r) {
        if (!visitors_[r]) ranks.push_back(r);
      }
      return fmt::format("rank{} {} did not come", ranks.size() == 1 ? "" : "s",
                         fmt::join(ranks, ", "));
    };
    co_await wait_for(all_here_, missing);
  } catch (...) {
    failure = std::current_exception();
  }
  door->close();
  if (failure) std::rethrow_exception(failure);
  do {
    epoch_ = random_number();
  } while (epoch_ == 0);
  json rows = json::array();
  for (const RankRow& row : rows_) rows.push_back(row.written());
  const std::string list = json({{"epoch", epoch_}, {"ranks", rows}}).dump();
  for (std::size_t r = 1; r < world(); ++r) {
    co_await write_message(*visitors_[r]->socket, visitors_[r]->conversation, list);
  }
}

Task<> RankMeeting::joined(std::shared_ptr<RankMeeting> self, SocketPtr socket, Guest guest) {
  const Introduction& from = guest.first;
  const auto rank = static_cast<std::size_t>(from.rank);
  const auto visitor = std::make_shared<Visitor>(Visitor{rank, socket, guest.second});
  const auto patience = close_after(self->reactor_, socket, Doorman::kPatience);
  const std::string text = co_await read_message(*socket, visitor->conversation, kMessageBytes);
  std::string refusal;
  if (from.errand != Errand::kJoin || from.world_size != self->options_.world_size) {
    refusal = fmt::format("rank {} says there are {} ranks, rank 0 says {}", from.rank,
                          from.world_size, self->options_.world_size);
  } else if (from.rank == 0 || self->visitors_[rank]) {
    refusal = fmt::format("there is a rank {} already: every process needs a number of its own",
                          from.rank);
  }
  if (!refusal.empty()) {
    const std::string answer = json({{"error", refusal}}).dump();
    co_await write_message(*socket, visitor->conversation, answer);
    co_return;
  }
  error_code error;
  const tcp::endpoint remote = socket->remote_endpoint(error);
  if (error) co_return;
  self->rows_[rank] = RankRow::read(json::parse(text));
  self->rows_[rank].address = remote.address().to_string();
  self->visitors_[rank] = visitor;
  asio::co_spawn(self->reactor_.context(), watch(self, visitor), asio::detached);
  if (--self->to_come_ == 0) self->all_here_.set();
}

/// One that has come says next that it is connected to all, and rank 0 that all are. A socket that
/// closes instead is a rank that ended, which nobody needs to wait for.
Task<> RankMeeting::watch(std::shared_ptr<RankMeeting> self, VisitorPtr visitor) {
  try {
    const std::string text =
        co_await read_message(*visitor->socket, visitor->conversation, kMessageBytes);
    if (const json message = json::parse(text); message.contains("lost"))
      self->lost_ = message["lost"].get<std::string>();
    visitor->connected = true;
  } catch (const std::exception& error) {
    if (!self->over_ && self->lost_.empty()) {
      self->lost_ = fmt::format("rank {} went away before all ranks were connected ({})",
                                visitor->rank, error.what());
    }
  }
  if (std::ranges::all_of(self->visitors_,
                          [](const VisitorPtr& its) { return !its || its->connected; }))
    self->all_connected_.set();
}

Task<> RankMeeting::join(const tcp::endpoint& at) {
  const auto host = std::make_shared<Visitor>(Visitor{0, nullptr, {}});
  host->socket = co_await call(at, as(Errand::kJoin), &host->conversation);
  tcp::endpoint local = host->socket->local_endpoint();
  local.port(0);
  doorman_ = std::make_shared<Doorman>(reactor_, local, options_.secret);
  const std::string row = own_row().written().dump();
  co_await write_message(*host->socket, host->conversation, row);
  const Nanoseconds left = std::max<Nanoseconds>(give_up_ - reactor_.clock().now(), {});
  const auto patience = close_after(reactor_, host->socket, left + kVerdict);
  const std::string text =
      co_await read_message(*host->socket, host->conversation, kMessageBytes * world());
  const json list = json::parse(text);
  if (list.contains("error")) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("rendezvous {}: {}", options_.rendezvous,
                                                         list["error"].get<std::string>()));
  }
  if (list.contains("lost")) lost_ = list["lost"].get<std::string>();
  check_nobody_is_lost();
  epoch_ = list.at("epoch").get<std::uint64_t>();
  for (std::size_t r = 0; r < world(); ++r) {
    rows_[r] = RankRow::read(list.at("ranks").at(r));
  }
  rows_[0].address = at.address().to_string();
  visitors_ = {host};
  asio::co_spawn(reactor_.context(), watch(shared_from_this(), host), asio::detached);
}

/// Nobody goes on before all are connected: until then a rank that ends is missed by rank 0, and
/// through it by all.
Task<> RankMeeting::part() {
  const std::string connected = json({{"connected", true}}).dump();
  if (own() != 0)
    co_await write_message(*visitors_[0]->socket, visitors_[0]->conversation, connected);
  const std::function<std::string()> missing = [this] {
    std::vector<std::size_t> ranks;
    for (const VisitorPtr& visitor : visitors_) {
      if (visitor && !visitor->connected) ranks.push_back(visitor->rank);
    }
    return fmt::format("rank{} {} met the others, and did not say that all are connected",
                       ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
  };
  co_await wait_for(all_connected_, missing);
  check_nobody_is_lost();
  if (own() != 0) co_return;
  for (const VisitorPtr& visitor : visitors_) {
    if (visitor) co_await write_message(*visitor->socket, visitor->conversation, connected);
  }
}

/// As far as they can be told: rank 0 speaks to everybody, and who loses rank 0 knows by that.
Task<> RankMeeting::end_for_all(const std::exception_ptr& failure) {
  std::string why = lost_;
  try {
    if (failure) std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    if (why.empty()) why = error.what();
  }
  over_ = true;
  for (const VisitorPtr& visitor : visitors_) {
    if (!visitor) continue;
    try {
      const std::string text = json({{"lost", why.substr(0, kMessageBytes / 2)}}).dump();
      if (failure && own() == 0)
        co_await write_message(*visitor->socket, visitor->conversation, text);
    } catch (const Error&) {
      // It is the one that went away, or it follows.
    }
    error_code ignored;  // the socket is released whatever close() says
    visitor->socket->close(ignored);
  }
}

Task<TcpOptions> RankMeeting::run() {
  const tcp::endpoint at = co_await resolve();
  std::exception_ptr failure;
  try {
    if (own() == 0) {
      co_await host(at);
    } else {
      co_await join(at);
    }
    co_await connect_all();
    co_await part();
  } catch (...) {
    failure = std::current_exception();
  }
  if (doorman_) doorman_->close();
  co_await end_for_all(failure);
  if (failure) std::rethrow_exception(failure);
  TcpOptions connected;
  connected.rank = options_.rank;
  connected.epoch = epoch_;
  connected.timeout = options_.call_timeout;
  connected.peers.resize(world());
  for (std::size_t r = 0; r < world(); ++r) {
    connected.peers[r].host = rows_[r].host;
    if (options_.through_memory) connected.peers[r].memory = rows_[r].memory;
    if (r == own()) continue;
    connected.peers[r].control = std::make_unique<TcpSocket>(std::move(*sockets_[r][0]));
    connected.peers[r].bulk = std::make_unique<TcpSocket>(std::move(*sockets_[r][1]));
  }
  co_return connected;
}

}  // namespace ziggurat
