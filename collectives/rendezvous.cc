// SPDX-License-Identifier: Apache-2.0
// collectives/rendezvous.cc: the meeting at rank 0, then a socket pair between any two.
#include "collectives/rendezvous.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <boost/asio/connect.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/error.h"
#include "collectives/doorman.h"
#include "collectives/exchange_communicator.h"
#include "collectives/mpi_channel.h"
#include "collectives/nccl_communicator.h"
#include "collectives/self_communicator.h"

namespace ziggurat {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;
using nlohmann::json;
using SocketPtr = std::shared_ptr<tcp::socket>;

constexpr std::size_t kRowBytes = 512;  // of a rank, in a message
constexpr Nanoseconds kRetry = std::chrono::milliseconds(20);

/// Where a rank listens, and what it shares a host with.
struct Row {
  std::string address;  // as rank 0 sees it; empty: rank 0's own
  std::uint16_t port = 0;
  std::string host;
  MemoryProbe memory;  // none: ranks of a host use sockets too

  json written() const {
    return {address, port, host, memory.process, memory.address, memory.value};
  }
  static Row read(const json& row) {
    return {row.at(0).get<std::string>(),
            row.at(1).get<std::uint16_t>(),
            row.at(2).get<std::string>(),
            {row.at(3).get<std::int64_t>(), row.at(4).get<std::uint64_t>(),
             row.at(5).get<std::uint64_t>()}};
  }
};

class Meeting : public std::enable_shared_from_this<Meeting> {
 public:
  Meeting(Reactor& reactor, RankOptions options)
      : reactor_(reactor),
        options_(std::move(options)),
        rows_(world()),
        give_up_(reactor.clock().now() + options_.connect_timeout) {
    sockets_.resize(world());
  }

  Task<TcpOptions> run();

 private:
  struct Visitor {
    SocketPtr socket;
    Conversation conversation;
  };

  std::size_t world() const { return static_cast<std::size_t>(options_.world_size); }
  std::size_t own() const { return static_cast<std::size_t>(options_.rank); }
  Row own_row() const {
    return {"", doorman_->address().port(), this_host(),
            options_.through_memory() ? own_memory_probe() : MemoryProbe{}};
  }
  Introduction as(Errand errand) const {
    return {errand, options_.rank, options_.world_size, epoch_};
  }

  Task<tcp::endpoint> resolve();
  Task<> host(const tcp::endpoint& at);
  // By shared pointer: who is still being welcomed when the meeting is over holds on to it.
  static Task<> joined(std::shared_ptr<Meeting> self, SocketPtr socket, Guest guest);
  Task<> join(const tcp::endpoint& at);
  Task<SocketPtr> call(const tcp::endpoint& at, Introduction introduction,
                       Conversation* conversation);
  static Task<> called(std::shared_ptr<Meeting> self, SocketPtr socket, Guest guest);
  Task<> call_below(std::size_t rank, Errand errand);
  Task<> connect_all();
  void check_secret(const tcp::endpoint& at) const;
  Task<> pause();
  Task<> wait_for(Signal& signal, const std::function<std::string()>& what);
  SocketPtr& socket_of(std::size_t rank, Errand errand) {
    return sockets_[rank][errand == Errand::kControl ? 0 : 1];
  }

  Reactor& reactor_;
  RankOptions options_;
  std::vector<Row> rows_;
  std::vector<std::array<SocketPtr, 2>> sockets_;  // control, bulk
  std::vector<std::shared_ptr<Visitor>> visitors_;
  std::size_t to_come_ = 0;
  Signal all_here_{reactor_};
  std::shared_ptr<Doorman> doorman_;
  std::uint64_t epoch_ = 0;
  Nanoseconds give_up_;
};

Task<> Meeting::pause() {
  const auto over = std::make_shared<Signal>(reactor_);
  reactor_.clock().after(kRetry, [over] { over->set(); });
  co_await over->wait();
}

Task<> Meeting::wait_for(Signal& signal, const std::function<std::string()>& what) {
  while (!signal.is_set()) {
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

Task<tcp::endpoint> Meeting::resolve() {
  const std::string& text = options_.rendezvous;
  if (text.empty()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("rank {} of {} ({}) on several hosts: set ZIGGURAT_RENDEZVOUS=HOST:PORT "
                    "to an address of rank 0's machine that the others reach",
                    options_.rank, options_.world_size, options_.source));
  }
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

void Meeting::check_secret(const tcp::endpoint& at) const {
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
Task<SocketPtr> Meeting::call(const tcp::endpoint& at, Introduction introduction,
                              Conversation* conversation) {
  std::string last;
  while (reactor_.clock().now() < give_up_) {
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

/// Rank 0: takes everybody in, then tells everybody of all.
Task<> Meeting::host(const tcp::endpoint& at) {
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
  for (const Row& row : rows_) rows.push_back(row.written());
  const std::string list = json({{"epoch", epoch_}, {"ranks", rows}}).dump();
  for (std::size_t r = 1; r < world(); ++r) {
    co_await write_message(*visitors_[r]->socket, visitors_[r]->conversation, list);
  }
}

Task<> Meeting::joined(std::shared_ptr<Meeting> self, SocketPtr socket, Guest guest) {
  const Introduction& from = guest.first;
  const auto visitor = std::make_shared<Visitor>();
  visitor->socket = socket;
  visitor->conversation = guest.second;
  const auto patience = close_after(self->reactor_, socket, Doorman::kPatience);
  const std::string text = co_await read_message(*socket, visitor->conversation, kRowBytes);
  std::string refusal;
  if (from.errand != Errand::kJoin || from.world_size != self->options_.world_size) {
    refusal = fmt::format("rank {} says there are {} ranks, rank 0 says {}", from.rank,
                          from.world_size, self->options_.world_size);
  } else if (from.rank == 0 || self->visitors_[static_cast<std::size_t>(from.rank)]) {
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
  const auto rank = static_cast<std::size_t>(from.rank);
  self->rows_[rank] = Row::read(json::parse(text));
  self->rows_[rank].address = remote.address().to_string();
  self->visitors_[rank] = visitor;
  if (--self->to_come_ == 0) self->all_here_.set();
}

Task<> Meeting::join(const tcp::endpoint& at) {
  Conversation conversation;
  const SocketPtr socket = co_await call(at, as(Errand::kJoin), &conversation);
  tcp::endpoint local = socket->local_endpoint();
  local.port(0);
  doorman_ = std::make_shared<Doorman>(reactor_, local, options_.secret);
  const std::string row = own_row().written().dump();
  co_await write_message(*socket, conversation, row);
  const auto patience = close_after(
      reactor_, socket, std::max<Nanoseconds>(give_up_ - reactor_.clock().now(), kRetry));
  const std::string text = co_await read_message(*socket, conversation, kRowBytes * world());
  const json list = json::parse(text);
  if (list.contains("error")) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("rendezvous {}: {}", options_.rendezvous,
                                                         list["error"].get<std::string>()));
  }
  epoch_ = list.at("epoch").get<std::uint64_t>();
  for (std::size_t r = 0; r < world(); ++r) {
    rows_[r] = Row::read(list.at("ranks").at(r));
  }
  rows_[0].address = at.address().to_string();
}

Task<> Meeting::called(std::shared_ptr<Meeting> self, SocketPtr socket, Guest guest) {
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

Task<> Meeting::call_below(std::size_t rank, Errand errand) {
  const tcp::endpoint at(asio::ip::make_address(rows_[rank].address), rows_[rank].port);
  Conversation conversation;
  socket_of(rank, errand) = co_await call(at, as(errand), &conversation);
}

Task<> Meeting::connect_all() {
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

Task<TcpOptions> Meeting::run() {
  const tcp::endpoint at = co_await resolve();
  std::exception_ptr failure;
  try {
    if (own() == 0) {
      co_await host(at);
    } else {
      co_await join(at);
    }
    co_await connect_all();
  } catch (...) {
    failure = std::current_exception();
  }
  if (doorman_) doorman_->close();
  if (failure) std::rethrow_exception(failure);
  TcpOptions connected;
  connected.rank = options_.rank;
  connected.epoch = epoch_;
  connected.timeout = options_.call_timeout;
  connected.peers.resize(world());
  for (std::size_t r = 0; r < world(); ++r) {
    connected.peers[r].host = rows_[r].host;
    if (options_.through_memory()) connected.peers[r].memory = rows_[r].memory;
    if (r == own()) continue;
    connected.peers[r].control = std::make_unique<TcpSocket>(std::move(*sockets_[r][0]));
    connected.peers[r].bulk = std::make_unique<TcpSocket>(std::move(*sockets_[r][1]));
  }
  co_return connected;
}

}  // namespace

Task<TcpOptions> meet_ranks(Reactor& reactor, RankOptions options) {
  reactor.external_begin();
  const auto meeting = std::make_shared<Meeting>(reactor, std::move(options));
  std::exception_ptr failure;
  TcpOptions connected;
  try {
    connected = co_await meeting->run();
  } catch (...) {
    failure = std::current_exception();
  }
  reactor.external_end();
  if (failure) std::rethrow_exception(failure);
  co_return connected;
}

std::unique_ptr<Communicator> connect_ranks(Reactor& reactor, WorkerPool& workers,
                                            const RankOptions& options) {
  if (options.world_size == 1) return std::make_unique<SelfCommunicator>();
  // Before anybody waits for this rank.
  const auto gpu = options.collectives == Collectives::kNccl ? open_nccl(options.call_timeout)
                                                             : std::shared_ptr<NcclDevice>();
  ExchangeOptions connected =
      options.collectives == Collectives::kMpi
          ? over_mpi(reactor, MpiLink::open(), options)
          : over_sockets(reactor, reactor.block_on(meet_ranks(reactor, options)));
  auto transport = ExchangeTransport::create(reactor, workers, std::move(connected));
  if (gpu) return over_nccl(std::move(transport), gpu);
  return std::make_unique<ExchangeCommunicator>(std::move(transport));
}

}  // namespace ziggurat
