// SPDX-License-Identifier: Apache-2.0
// integrations/measure/collectives_suite.cc: measures the limits first, and then every operation
// and size.
#include "integrations/measure/collectives_suite.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/bytes.h"
#include "base/error.h"
#include "collectives/rendezvous/rendezvous.h"
#include "integrations/measure/collectives_limits.h"
#include "integrations/measure/measurement.h"

namespace ziggurat::measure {
namespace {

constexpr std::size_t kSmallest = 4 * kKiB;
constexpr std::size_t kGrowth = 16;

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

/// The limit with which figures are compared.
struct Limit {
  std::string of;
  double exchange = 0;  // GB/s
  double one_way = 0;
};

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
  ~Bench() { reactor_.destroy(communicator_); }

  std::vector<CollectivesRow> run();

 private:
  using Call = std::function<Task<>(Communicator&)>;

  /// Makes a call on the reactor and waits until it is done. All ranks must make it at once.
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
  void measure_back_end(Collectives back_end);
  Limit limit_of(Collectives back_end);
  void measure_all(std::size_t bytes);
  void check_sums();

  Reactor& reactor_;
  WorkerPool& workers_;
  RankOptions ranks_;
  const CollectivesBenchOptions& options_;
  std::vector<std::byte> in_, out_;
  std::unique_ptr<Communicator> communicator_;
  std::optional<SocketLimits> sockets_;
  std::shared_ptr<MpiLink> mpi_;  // open from the measurement of its limit to the end
  Limit limit_;
  std::vector<CollectivesRow> rows_;
};

double Bench::timed(const Call& call) {
  std::vector<double> seconds;
  for (int i = 0; i <= options_.rounds; ++i) {  // the first round only touches the memory
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
  rows_.push_back({ranks_.collectives == Collectives::kAuto
                       ? "memory"
                       : std::string(to_string(ranks_.collectives)),
                   operation, bytes, seconds, share * static_cast<double>(bytes) / seconds / 1e9,
                   limit, limit_.of});
}

/// Measures the limit of what this back end sends through. All ranks must call it.
Limit Bench::limit_of(Collectives back_end) {
  if (back_end == Collectives::kTcp) {
    if (!sockets_) sockets_ = socket_limits(reactor_, ranks_);
    return {"socket", sockets_->exchange, sockets_->one_way};
  }
  if (back_end == Collectives::kMpi) {
    mpi_ = MpiLink::open();
    const double limit = mpi_limit(*mpi_);
    return {"message", limit, limit};
  }
  const double limit = copy_limit([this] { await([](Communicator& c) { return c.barrier(); }); });
  return {"copy", limit, limit};
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

void Bench::measure_all(std::size_t bytes) {
  const auto world = static_cast<std::size_t>(ranks_.world_size);
  const std::size_t slice = bytes / world / sizeof(float) * sizeof(float);
  const std::size_t whole = slice * world;
  const double ring = static_cast<double>(world - 1) / static_cast<double>(world);
  const double exchange = limit_.exchange;
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
  measure("send", bytes, 1, limit_.one_way, [=](Communicator& c) -> Task<> {
    if (c.rank() == 0) return c.send(in.first(bytes), 1);
    if (c.rank() == 1) return c.recv(out.first(bytes), 0);
    const auto nothing = []() -> Task<> { co_return; };
    return nothing();
  });
}

void Bench::measure_back_end(Collectives back_end) {
  ranks_.collectives = back_end;
  // Plain sockets are measured before the ranks connect, so that nothing else uses the sockets.
  if (back_end == Collectives::kTcp) limit_ = limit_of(back_end);
  communicator_ = connect_ranks(reactor_, workers_, ranks_);
  if (back_end != Collectives::kTcp) limit_ = limit_of(back_end);
  check_sums();
  measure("barrier", 0, 0, 0, [](Communicator& c) { return c.barrier(); });
  for (std::size_t bytes = kSmallest; bytes <= options_.largest_bytes; bytes *= kGrowth) {
    measure_all(bytes);
  }
  await([](Communicator& c) { return c.barrier(); });
  reactor_.destroy(communicator_);
}

std::vector<CollectivesRow> Bench::run() {
  for (const Collectives back_end : options_.back_ends) measure_back_end(back_end);
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

nlohmann::json collectives_json(const std::vector<CollectivesRow>& rows) {
  auto list = nlohmann::json::array();
  for (const CollectivesRow& row : rows) {
    nlohmann::json one{{"through", row.transport},
                       {"operation", row.operation},
                       {"bytes", row.bytes},
                       {"seconds", row.seconds}};
    if (row.bytes != 0) {
      one["bus_gb_per_s"] = row.bus_gb_per_s;
      one["limit"] = row.limit;
      one["limit_gb_per_s"] = row.limit_gb_per_s;
    }
    list.push_back(std::move(one));
  }
  return list;
}

}  // namespace ziggurat::measure
