// SPDX-License-Identifier: Apache-2.0
// core/rehearsal/rank_twins.cc: makes the twins of a rank, and counts what they do.
#include "core/rehearsal/rank_twins.h"

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "base/checksum.h"
#include "base/runtime/seconds.h"
#include "tiers/pool/host_mapping.h"

namespace ziggurat {
namespace {

std::uint64_t addresses(const RehearsalRequest& request, std::uint64_t lent_bytes) {
  const std::uint64_t of_a_rank = round_up(request.config.host_budget_bytes, kHugePageBytes) +
                                  round_up(request.machine.device.memory_bytes, kHugePageBytes);
  const int played = request.mirrored ? 1 : request.machine.network.ranks;
  return static_cast<std::uint64_t>(played) * of_a_rank + lent_bytes;
}

/// Returns for how many ranks of a node one that is played stands.
int ranks_for_each(const RehearsalRequest& request) noexcept {
  const NetworkShape& shape = request.machine.network;
  return request.mirrored ? std::min(shape.ranks, shape.ranks_per_node) : 1;
}

}  // namespace

Task<> pass_time(Reactor& reactor, double seconds) {
  Signal over(reactor);
  reactor.clock().after(nanoseconds_of(seconds), [&over] { over.set(); });
  co_await over.wait();
}

std::uint64_t disk_bytes(const RehearsalRequest& request) noexcept {
  constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 60;
  const std::uint64_t of_a_node = request.machine.drive.node_bytes;
  if (of_a_node == 0) return kNoLimit;
  const NetworkShape& shape = request.machine.network;
  const int nodes = (shape.ranks + shape.ranks_per_node - 1) / shape.ranks_per_node;
  const auto played = static_cast<std::uint64_t>(request.mirrored ? 1 : nodes);
  return played * of_a_node / static_cast<std::uint64_t>(ranks_for_each(request));
}

RehearsedWorld::RehearsedWorld(const RehearsalRequest& its, std::shared_ptr<SimulatedDisk> its_disk,
                               RehearsalWatch* its_watch, std::uint64_t lent_bytes)
    : request(its),
      watch(its_watch),
      network(its.machine.network),
      absent(addresses(its, lent_bytes)),
      disk(std::move(its_disk)) {
  reactor.clock().shuffle_ties(its.order_seed);
  reactor.shuffle_ready(its.order_seed);
  if (!its.trace_path.empty()) {
    trace = Trace::open(its.trace_path);
    // A trace counts from the real time at which it was opened, so virtual time begins there.
    reactor.clock().after(monotonic_now(), [] {});
    reactor.clock().run_next_due();
  }
  if (watch == nullptr) return;
  network.late = [this](int from, std::uint64_t number) {
    ++watch->ranks[static_cast<std::size_t>(from)].messages;
    for (const RehearsalFaults::LateMessage& late : watch->faults.late_messages)
      if (late.rank == from && late.number == number) return late.delay;
    return Nanoseconds(0);
  };
}

RehearsedWorld::~RehearsedWorld() {
  if (watch == nullptr) return;
  watch->events = watch->ledger.begun();
  watch->history =
      mix_seed(watch->ledger.history(), static_cast<std::uint64_t>(reactor.clock().now().count()));
}

RankTwins::RankTwins(RehearsedWorld& world, std::unique_ptr<Communicator> ranks)
    : world_(world), runtime_(world.reactor), rank_(ranks->rank()) {
  if (rank_ == 0) trace_ = world.trace.get();
  build_runtime(std::move(ranks));
  CostedDeviceOptions device = world.request.machine.device;
  device.ledger = world.ledger();
  device_ = std::make_unique<CostedDevice>(world.reactor, world.absent, device, &runtime_.metrics,
                                           trace_);
  if (trace_ != nullptr && device_->host_accessible()) track_ = trace_->track("trainer");
}

RankTwins::~RankTwins() = default;

void RankTwins::build_runtime(std::unique_ptr<Communicator> ranks) {
  const RehearsedMachine& machine = world_.request.machine;
  CostedWorkersOptions options = machine.workers;
  options.ledger = world_.ledger();
  auto workers = std::make_unique<CostedWorkers>(world_.reactor, options, trace_);
  workers_ = workers.get();
  runtime_.twin = std::move(workers);
  if (trace_ != nullptr) runtime_.trace = std::move(world_.trace);
  runtime_.absent = &world_.absent;
  runtime_.drive_node = [](const std::string&) { return -1; };
  runtime_.drive_number = [&all = world_.request.config.store](const std::string& directory) {
    std::uint64_t number = 0;
    while (all[number].path != directory) ++number;
    return number;
  };
  const int node = rank_ / machine.network.ranks_per_node;
  runtime_.io_engine = [this, node](Reactor&, const std::string& directory) {
    return make_drive(directory, node);
  };
  runtime_.ranks = std::move(ranks);
}

std::unique_ptr<IoEngine> RankTwins::make_drive(const std::string& directory, int node) {
  const RehearsedDrive& drive = world_.request.machine.drive;
  DriveBusyUntil& shared = world_.drives[{node, directory}];
  if (!shared) shared = std::make_shared<Nanoseconds>(0);
  const double sharing = ranks_for_each(world_.request);
  SimulatedEngineOptions options;
  options.read_bytes_per_second = drive.read_bytes_per_second / sharing;
  options.write_bytes_per_second = drive.write_bytes_per_second / sharing;
  options.latency = drive.latency;
  options.jitter = drive.jitter;
  options.seed = drive.seed;
  options.queue_depth = drive.queue_depth;
  options.drive = shared;
  options.absent = &world_.absent;
  options.ledger = world_.ledger();
  auto engine = std::make_unique<SimulatedEngine>(world_.reactor, *world_.disk, std::move(options));
  if (world_.request.around_drive) return world_.request.around_drive(rank_, std::move(engine));
  if (world_.watch == nullptr) return engine;
  auto faulty = std::make_unique<FaultyEngine>(world_.reactor, std::move(engine));
  for (const RehearsalFaults::OfDrive& its : world_.watch->faults.drives)
    if (its.rank == rank_) faulty->plan(its.fault);
  faulty_.push_back(faulty.get());
  return faulty;
}

double RankTwins::now() const {
  return 1e-9 * static_cast<double>(world_.reactor.clock().now().count());
}

RankTwins::Reading RankTwins::read() const {
  Reading all;
  for (std::size_t i = 0; i < static_cast<std::size_t>(Counter::kCount); ++i)
    all.counters.push_back(runtime_.metrics.value(static_cast<Counter>(i)));
  all.workers_busy_s = 1e-9 * static_cast<double>(workers_->busy().count());
  const Traffic traffic = runtime_.ranks->traffic();
  all.sent_in_node = traffic.same_host.payload_bytes;
  all.sent_to_nodes = traffic.other_hosts.payload_bytes;
  return all;
}

void RankTwins::count_step(const Reading& before, const Account& host, RehearsedStep& step) const {
  const Reading after = read();
  for (std::size_t i = 0; i < after.counters.size(); ++i)
    step.counters.push_back(after.counters[i] - before.counters[i]);
  step.workers_busy_s = after.workers_busy_s - before.workers_busy_s;
  step.sent_in_node = after.sent_in_node - before.sent_in_node;
  step.sent_to_nodes = after.sent_to_nodes - before.sent_to_nodes;
  step.host_peak_bytes = host.peak_bytes();
  step.device_peak_bytes = device_->account().peak_bytes();
}

}  // namespace ziggurat
