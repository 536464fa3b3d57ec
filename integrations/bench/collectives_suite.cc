// SPDX-License-Identifier: Apache-2.0
// integrations/bench/collectives_suite.cc: limits first, then every operation and size.
#include "integrations/bench/collectives_suite.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <cstring>
#include <functional>
#include <thread>

#include "base/bytes.h"
#include "base/error.h"
#include "collectives/exchange_communicator.h"
#include "collectives/rendezvous.h"

namespace ziggurat::bench {
namespace {

constexpr std::size_t kSmallest = 4 * kKiB;
constexpr std::size_t kGrowth = 16;
constexpr std::size_t kSocketBytes = 512 * kMiB;
constexpr std::size_t kSocketPiece = kMiB;
constexpr std::size_t kCopyBytes = 256 * kMiB;

double seconds_since(Nanoseconds start) {
  return std::chrono::duration<double>(monotonic_now() - start).count();
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

struct Limits {
  double one_way = 0;  // GB/s of a plain socket
  double ring = 0;     // of each rank's, sending and receiving at once
  double copy = 0;     // of each rank, all at once
};

void send_all(TcpSocket& socket) {
  const std::vector<std::byte> piece(kSocketPiece);
  for (std::size_t sent = 0; sent < kSocketBytes; sent += piece.size()) {
    boost::asio::write(socket, boost::asio::buffer(piece));
  }
}

void receive_all(TcpSocket& socket) {
  std::vector<std::byte> piece(kSocketPiece);
  for (std::size_t got = 0; got < kSocketBytes; got += piece.size()) {
    boost::asio::read(socket, boost::asio::buffer(piece));
  }
}

/// Plain blocking reads and writes of 1 MiB on the sockets that ranks would use.
Limits socket_limits(Reactor& reactor, const RankOptions& ranks) {
  TcpOptions met = reactor.block_on(meet_ranks(reactor, ranks));
  const int world = ranks.world_size;
  TcpSocket& next = *met.peers[static_cast<std::size_t>((ranks.rank + 1) % world)].bulk;
  TcpSocket& before = *met.peers[static_cast<std::size_t>((ranks.rank + world - 1) % world)].bulk;
  for (TcpSocket* socket : {&next, &before}) socket->native_non_blocking(false);
  Limits limits;
  Nanoseconds start = monotonic_now();
  if (ranks.rank == 0) send_all(next);
  if (ranks.rank == 1) receive_all(before);
  limits.one_way = static_cast<double>(kSocketBytes) / seconds_since(start) / 1e9;
  start = monotonic_now();
  std::thread sending([&] { send_all(next); });
  receive_all(before);
  sending.join();
  limits.ring = static_cast<double>(kSocketBytes) / seconds_since(start) / 1e9;
  return limits;
}

class Bench {
 public:
  Bench(Reactor& reactor, WorkerPool& workers, RankOptions ranks,
        const CollectivesBenchOptions& options)
      : reactor_(reactor),
        workers_(workers),
        ranks_(std::move(ranks)),
        options_(options),
        in_(options.largest_bytes),
        out_(options.largest_bytes) {}

  std::vector<CollectivesRow> run();

 private:
  using Call = std::function<Task<>(Communicator&)>;

  /// Made on the reactor, all ranks at once.
  void await(const Call& call) {
    const auto wrapped = [&]() -> Task<> {
      Task<> task = call(*communicator_);
      co_await std::move(task);
    };
    reactor_.block_on(wrapped());
  }
  double timed(const Call& call);
  void measure(const std::string& operation, std::size_t bytes, double share, double limit,
               const Call& call);
  void measure_all(std::size_t bytes);
  void check_sums();
  double copy_limit();

  Reactor& reactor_;
  WorkerPool& workers_;
  RankOptions ranks_;
  const CollectivesBenchOptions& options_;
  std::vector<std::byte> in_, out_;
  std::unique_ptr<Communicator> communicator_;
  Limits limits_;
  std::vector<CollectivesRow> rows_;
};

double Bench::timed(const Call& call) {
  std::vector<double> seconds;
  for (int i = 0; i <= options_.rounds; ++i) {  // the first one touches the memory
    await([](Communicator& c) { return c.barrier(); });
    const Nanoseconds start = monotonic_now();
    await(call);
    if (i > 0) seconds.push_back(seconds_since(start));
  }
  return median(std::move(seconds));
}

void Bench::measure(const std::string& operation, std::size_t bytes, double share, double limit,
                    const Call& call) {
  const double seconds = timed(call);
  rows_.push_back({ranks_.through_memory ? "memory" : "tcp", operation, bytes, seconds,
                   share * static_cast<double>(bytes) / seconds / 1e9, limit,
                   ranks_.through_memory ? "copy" : "socket"});
}

void Bench::check_sums() {
  const auto floats = std::span(reinterpret_cast<float*>(in_.data()), in_.size() / sizeof(float));
  std::ranges::fill(floats, static_cast<float>(ranks_.rank + 1));
  await([&](Communicator& c) { return c.all_reduce(in_, DType::kFloat32); });
  const auto sum = static_cast<float>(ranks_.world_size * (ranks_.world_size + 1) / 2);
  if (!std::ranges::all_of(floats, [&](float x) { return x == sum; })) {
    throw Error(ErrorCode::kDataLoss, "bench collectives: all_reduce gave a wrong sum");
  }
}

double Bench::copy_limit() {
  std::vector<std::byte> from(kCopyBytes);
  std::vector<std::byte> to(kCopyBytes);
  const Call copy = [&](Communicator& c) {
    std::memcpy(to.data(), from.data(), to.size());
    return c.barrier();
  };
  return static_cast<double>(kCopyBytes) / timed(copy) / 1e9;
}

void Bench::measure_all(std::size_t bytes) {
  const auto world = static_cast<std::size_t>(ranks_.world_size);
  const std::size_t slice = bytes / world / sizeof(float) * sizeof(float);
  const std::size_t whole = slice * world;
  const double ring = static_cast<double>(world - 1) / static_cast<double>(world);
  const double exchange = ranks_.through_memory ? limits_.copy : limits_.ring;
  const auto in = std::span(in_);
  const auto out = std::span(out_);
  measure("all_reduce", bytes, 2 * ring, exchange,
          [=](Communicator& c) { return c.all_reduce(in.first(bytes), DType::kBFloat16); });
  measure("all_gather", whole, ring, exchange,
          [=](Communicator& c) { return c.all_gather(in.first(slice), out.first(whole)); });
  measure("reduce_scatter", whole, ring, exchange, [=](Communicator& c) {
    return c.reduce_scatter(in.first(whole), out.first(slice), DType::kBFloat16);
  });
  measure("all_to_all", whole, ring, exchange,
          [=](Communicator& c) { return c.all_to_all(in.first(whole), out.first(whole)); });
  measure("send", bytes, 1, ranks_.through_memory ? limits_.copy : limits_.one_way,
          [=](Communicator& c) -> Task<> {
            if (c.rank() == 0) return c.send(in.first(bytes), 1);
            if (c.rank() == 1) return c.recv(out.first(bytes), 0);
            const auto nothing = []() -> Task<> { co_return; };
            return nothing();
          });
}

std::vector<CollectivesRow> Bench::run() {
  limits_ = socket_limits(reactor_, ranks_);
  for (const bool through_memory : {true, false}) {
    ranks_.through_memory = through_memory;
    communicator_ = connect_ranks(reactor_, workers_, ranks_);
    check_sums();
    if (through_memory) limits_.copy = copy_limit();
    measure("barrier", 0, 0, 0, [](Communicator& c) { return c.barrier(); });
    for (std::size_t bytes = kSmallest; bytes <= options_.largest_bytes; bytes *= kGrowth) {
      measure_all(bytes);
    }
    await([](Communicator& c) { return c.barrier(); });
    communicator_.reset();
  }
  return std::move(rows_);
}

}  // namespace

std::vector<CollectivesRow> run_collectives_bench(Reactor& reactor, WorkerPool& workers,
                                                  RankOptions ranks,
                                                  const CollectivesBenchOptions& options) {
  return Bench(reactor, workers, std::move(ranks), options).run();
}

std::vector<std::string> collectives_table(const std::vector<CollectivesRow>& rows) {
  std::vector<std::string> lines{fmt::format("{:<8} {:<15} {:>10} {:>12} {:>10} {:>16} {:>6}",
                                             "through", "operation", "bytes", "time", "bus GB/s",
                                             "limit GB/s", "share")};
  for (const CollectivesRow& row : rows) {
    std::string line =
        fmt::format("{:<8} {:<15} {:>10} {:>9.1f} us", row.transport, row.operation,
                    row.bytes == 0 ? "" : format_bytes(row.bytes), row.seconds * 1e6);
    if (row.bytes != 0) {
      line += fmt::format(" {:>10.2f} {:>7} {:>8.2f} {:>6.2f}", row.bus_gb_per_s, row.limit,
                          row.limit_gb_per_s, row.bus_gb_per_s / row.limit_gb_per_s);
    }
    lines.push_back(std::move(line));
  }
  return lines;
}

}  // namespace ziggurat::bench
