// SPDX-License-Identifier: Apache-2.0
// core/rehearsal/rehearsed_rank.cc: makes the twins of a rank, and plays its trainer.
#include "core/rehearsal/rehearsed_rank.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "base/bytes.h"
#include "base/checksum.h"
#include "base/error.h"
#include "base/runtime/seconds.h"
#include "tiers/pool/host_mapping.h"

namespace ziggurat {
namespace {

std::uint64_t addresses(const RehearsalRequest& request) {
  const std::uint64_t of_a_rank = round_up(request.config.host_budget_bytes, kHugePageBytes) +
                                  round_up(request.machine.device.memory_bytes, kHugePageBytes);
  const int played = request.mirrored ? 1 : request.machine.network.ranks;
  return static_cast<std::uint64_t>(played) * of_a_rank;
}

template <class T>
std::span<const std::byte> bytes_of(const DeviceSpan<T>& span) noexcept {
  return {reinterpret_cast<const std::byte*>(span.address()), span.size_bytes()};
}

/// Returns for how many ranks of a node one that is played stands.
int ranks_for_each(const RehearsalRequest& request) noexcept {
  const NetworkShape& shape = request.machine.network;
  return request.mirrored ? std::min(shape.ranks, shape.ranks_per_node) : 1;
}

Task<> pass_time(Reactor& reactor, double seconds) {
  Signal over(reactor);
  reactor.clock().after(nanoseconds_of(seconds), [&over] { over.set(); });
  co_await over.wait();
}

}  // namespace

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
                               RehearsalWatch* its_watch)
    : request(its),
      watch(its_watch),
      network(its.machine.network),
      absent(addresses(its)),
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

RankOnTwins::RankOnTwins(RehearsedWorld& world, std::unique_ptr<Communicator> ranks)
    : world_(world), runtime_(world.reactor), rank_(ranks->rank()) {
  if (rank_ == 0) trace_ = world.trace.get();
  build_runtime(std::move(ranks));
  const RehearsalRequest& request = world.request;
  CostedDeviceOptions device = request.machine.device;
  device.ledger = world.ledger();
  device_ = std::make_unique<CostedDevice>(world.reactor, world.absent, device, &runtime_.metrics,
                                           trace_);
  if (!device_->host_accessible()) {
    stream_ = device_->create_costed_stream("trainer");
  } else if (trace_ != nullptr) {
    track_ = trace_->track("trainer");
  }
  units_.resize(request.model.units.size());
  engine_ = EngineTasks::create(request.model, watched_config(), runtime_, *device_);
}

RankOnTwins::~RankOnTwins() = default;

void RankOnTwins::build_runtime(std::unique_ptr<Communicator> ranks) {
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

std::unique_ptr<IoEngine> RankOnTwins::make_drive(const std::string& directory, int node) {
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

double RankOnTwins::now() const {
  return 1e-9 * static_cast<double>(world_.reactor.clock().now().count());
}

RankOnTwins::Reading RankOnTwins::read() const {
  Reading all;
  for (std::size_t i = 0; i < static_cast<std::size_t>(Counter::kCount); ++i)
    all.counters.push_back(runtime_.metrics.value(static_cast<Counter>(i)));
  all.workers_busy_s = 1e-9 * static_cast<double>(workers_->busy().count());
  const Traffic traffic = runtime_.ranks->traffic();
  all.sent_in_node = traffic.same_host.payload_bytes;
  all.sent_to_nodes = traffic.other_hosts.payload_bytes;
  return all;
}

void RankOnTwins::count_step(const Reading& before, RehearsedStep& step) const {
  const Reading after = read();
  for (std::size_t i = 0; i < after.counters.size(); ++i)
    step.counters.push_back(after.counters[i] - before.counters[i]);
  step.workers_busy_s = after.workers_busy_s - before.workers_busy_s;
  step.sent_in_node = after.sent_in_node - before.sent_in_node;
  step.sent_to_nodes = after.sent_to_nodes - before.sent_to_nodes;
  step.host_peak_bytes = engine_->host_account().peak_bytes();
  step.device_peak_bytes = device_->account().peak_bytes();
}

Task<> RankOnTwins::live() {
  std::exception_ptr error;
  try {
    Task<> playing = play();
    co_await std::move(playing);
  } catch (...) {
    error = std::current_exception();
  }
  if (error) runtime_.ranks->abort("a rank of the rehearsal failed");
  if (!error && world_.watch != nullptr) watch_end();
  Task<> closing = engine_->close();
  co_await std::move(closing);
  if (world_.watch != nullptr) {
    world_.watch->must(device_->account().used_bytes() == 0,
                       fmt::format("rank {} has closed its engine, but of device memory {} are "
                                   "still in use",
                                   rank_, device_->account().text()));
  }
  if (error) std::rethrow_exception(error);
}

Task<> RankOnTwins::play() {
  // Masters have no memory here, so nobody asks for their values.
  const Initializer none = [](UnitId, std::uint64_t, std::span<float>) {};
  Task<> opening = engine_->open(none);
  co_await std::move(opening);
  const double opened = now();
  Reading reading = read();
  its_.before = reading.counters;
  for (int i = 0; i < world_.request.steps; ++i) {
    RehearsedStep step;
    step.began_s = now() - opened;
    Task<> training = train(i, step);
    co_await std::move(training);
    if (i + 1 == world_.request.steps) {
      const double ended = now();
      Task<> durable = engine_->make_durable();
      co_await std::move(durable);
      its_.durable_s = now() - ended;
      if (world_.watch != nullptr)
        world_.watch->ranks[static_cast<std::size_t>(rank_)].all_durable = true;
    }
    count_step(reading, step);
    reading = read();
    its_.steps.push_back(std::move(step));
  }
  its_.after = reading.counters;
  its_.host = engine_->host_account();
  its_.device = device_->account();
  its_.workers_busy_s = reading.workers_busy_s;
}

Task<> RankOnTwins::train(int index, RehearsedStep& step) {
  const double began = now();
  slowness_ = 1;
  if (world_.watch != nullptr) {
    for (const RehearsalFaults::SlowRank& slow : world_.watch->faults.slow_ranks)
      if (slow.rank == rank_ && slow.step == index) slowness_ = slow.factor;
  }
  StepOptions options;
  options.learning_rate = 1e-3F;
  Task<> preparing = engine_->prepare_step(options);
  co_await std::move(preparing);
  const auto units = static_cast<UnitId>(world_.request.model.units.size());
  for (int micro = 0; micro < world_.request.micro_batches; ++micro) {
    const bool last = micro == world_.request.micro_batches - 1;
    for (UnitId unit = 0; unit < units; ++unit) {
      Task<> its = forward(unit, step);
      co_await std::move(its);
    }
    for (const UnitId unit : world_.request.config.trainer_held_units) {
      Task<> its = between(unit, step);
      co_await std::move(its);
    }
    for (UnitId unit = units; unit-- > 0;) {
      Task<> its = backward(unit, last, step);
      co_await std::move(its);
    }
  }
  const double called = now();
  Task<StepResult> stepping = engine_->step(options);
  const StepResult result = co_await std::move(stepping);
  step.generation = result.generation;
  if (world_.watch != nullptr) watch_step(index, result);
  step.step_s = now() - called;
  step.seconds = now() - began;
}

bool RankOnTwins::held(UnitId unit) const {
  return std::ranges::find(world_.request.config.trainer_held_units, unit) !=
         world_.request.config.trainer_held_units.end();
}

Task<> RankOnTwins::acquire(UnitId unit, RehearsedStep& step) {
  const double called = now();
  Task<EngineTasks::Acquired> acquiring = engine_->acquire(unit);
  const EngineTasks::Acquired its = co_await std::move(acquiring);
  if (!stream_) co_await its.landed.wait();
  units_[unit] = {.params = bytes_of(its.params.bytes), .landed = its.landed};
  step.acquire_s += now() - called;
}

Task<> RankOnTwins::take_gradient(UnitId unit, RehearsedStep& step) {
  const double called = now();
  Task<EngineTasks::Gradient> taking = engine_->gradient(unit);
  const EngineTasks::Gradient gradient = co_await std::move(taking);
  units_[unit].gradient = bytes_of(gradient.values);
  if (stream_) {
    stream_->wait(gradient.zeroed);
  } else {
    co_await gradient.zeroed.wait();
  }
  step.gradient_s += now() - called;
}

Task<> RankOnTwins::forward(UnitId unit, RehearsedStep& step) {
  Task<> acquiring = acquire(unit, step);
  co_await std::move(acquiring);
  Task<> computing = compute("forward", unit, world_.request.costs[unit].forward_s, step);
  co_await std::move(computing);
  release(unit);
  tell_progress();
}

/// A unit that is held has its gradient open from here on.
Task<> RankOnTwins::between(UnitId unit, RehearsedStep& step) {
  Task<> acquiring = acquire(unit, step);
  co_await std::move(acquiring);
  Task<> taking = take_gradient(unit, step);
  co_await std::move(taking);
  Task<> computing = compute("head", unit, world_.request.costs[unit].between_s, step);
  co_await std::move(computing);
  release(unit);
}

Task<> RankOnTwins::backward(UnitId unit, bool last, RehearsedStep& step) {
  if (!held(unit)) {
    Task<> acquiring = acquire(unit, step);
    co_await std::move(acquiring);
    Task<> taking = take_gradient(unit, step);
    co_await std::move(taking);
  }
  Task<> computing = compute("backward", unit, world_.request.costs[unit].backward_s, step);
  co_await std::move(computing);
  const Event added = stream_ ? stream_->record() : Event();
  if (!held(unit)) release(unit);
  tell_progress();
  if (!last) co_return;
  const double finished = now();
  Task<> finishing = engine_->finish_gradient(unit, added);
  co_await std::move(finishing);
  step.gradient_s += now() - finished;
}

void RankOnTwins::release(UnitId unit) {
  engine_->release(unit, stream_ ? stream_->record() : Event());
  units_[unit].params = {};
}

/// Computes once the unit's parameters are there: on the CPU until it is done, on a GPU's stream
/// without waiting for it.
Task<> RankOnTwins::compute(const char* what, UnitId unit, double seconds, RehearsedStep& step) {
  seconds *= slowness_;
  step.compute_s += seconds;
  const InUse& its = units_[unit];
  if (stream_) {
    stream_->wait(its.landed);
    stream_->compute(nanoseconds_of(seconds), what, unit,
                     {.read = its.params, .written = its.gradient});
    co_return;
  }
  const AccessLedger::Access reading = AccessLedger::read(world_.ledger(), its.params, what);
  const AccessLedger::Access writing = AccessLedger::write(world_.ledger(), its.gradient, what);
  const Nanoseconds began = world_.reactor.clock().now();
  Task<> passing = pass_time(world_.reactor, seconds);
  co_await std::move(passing);
  if (trace_ != nullptr) trace_->span(track_, what, began, world_.reactor.clock().now(), unit);
}

void RankOnTwins::tell_progress() {
  const RehearsalRequest& request = world_.request;
  if (!request.progress || rank_ != 0) return;
  request.progress(++uses_, 2 * request.model.units.size() *
                                static_cast<std::uint64_t>(request.steps) *
                                static_cast<std::uint64_t>(request.micro_batches));
}

}  // namespace ziggurat
