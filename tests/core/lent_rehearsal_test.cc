// SPDX-License-Identifier: Apache-2.0
// tests/core/lent_rehearsal_test.cc: a trainer that lends its memory takes as long in virtual time
// as closed forms say, and moves what a run with real bytes moves.
#include "core/rehearsal/lent_rehearsal.h"

#include "tests/core/lent_trainer.h"
#include "tests/core/rehearsed_units.h"
#include "tests/support/scratch_directory.h"
#include "tests/support/typed_array.h"
#include "tiers/device/host_device.h"

namespace ziggurat {
namespace lent_rehearsal_test {

using namespace testing::rehearsed;
using Kind = LentEvent::Kind;

constexpr double kForward = 1e-5;
constexpr double kBackward = 2e-5;

/// Parameters of equal size, each a unit of its own that the engine keeps unless they are `lent`.
ModelSpec equal_params(std::size_t units, std::uint64_t count, bool lent = false) {
  ModelSpec model = equal_units(units, count);
  for (std::uint32_t u = 0; u < units; ++u) {
    model.units[u].params[0].group = u;
    if (!lent) model.units[u].params[0].streamed = u;
  }
  return model;
}

/// What a forward and a backward over units do, and then the step.
std::vector<LentEvent> recorded(std::size_t units, double forward_s, double backward_s,
                                Kind gradient = Kind::kGradient, bool streamed = true) {
  std::vector<LentEvent> events;
  const auto use = [&](std::uint32_t unit, double seconds) {
    events.push_back({.kind = streamed ? Kind::kAcquire : Kind::kWait, .of = unit});
    events.push_back({.kind = Kind::kCompute, .seconds = seconds});
  };
  for (std::uint32_t u = 0; u < units; ++u) {
    use(u, forward_s);
    if (streamed) events.push_back({.kind = Kind::kRelease, .of = u});
  }
  for (std::uint32_t u = static_cast<std::uint32_t>(units); u-- > 0;) {
    use(u, backward_s);
    events.push_back({.kind = gradient, .of = u});
    if (streamed) events.push_back({.kind = Kind::kRelease, .of = u});
  }
  events.push_back({.kind = Kind::kStep});
  return events;
}

LentRehearsal equal_lent_run(Tier optimizer) {
  const RehearsalRequest like = equal_run(optimizer);
  LentRehearsal request{.model = equal_params(kUnits, kUnitCount),
                        .config = like.config,
                        .machine = like.machine,
                        .events = recorded(kUnits, kForward, kBackward)};
  request.config.clip_norm = 0;
  if (optimizer == Tier::kHost) request.config.store.clear();
  return request;
}

TEST(LentRehearsal, BoundByCompute) {
  for (const Tier optimizer : {Tier::kHost, Tier::kNvme}) {
    LentRehearsal request = equal_lent_run(optimizer);
    request.events = recorded(kUnits, 0.1, 0.2);
    const RehearsedRank rank = rehearse_lent(request);
    expect_within(steady(rank), kUnits * 0.3, 0.01);
    expect_within(rank.steps[2].compute_s, kUnits * 0.3, 0.001);
  }
}

/// The update waits for the step, and runs beside the next forward. As all units are computed at
/// once, nothing hides it.
TEST(LentRehearsal, BoundByTheDrive) {
  LentRehearsal request = equal_lent_run(Tier::kNvme);
  request.config.host_budget_bytes = kGiB;
  request.machine.drive.read_bytes_per_second = 2e9;
  request.machine.drive.write_bytes_per_second = 1e9;
  const RehearsedRank rank = rehearse_lent(request);
  const RehearsedStep& step = rank.steps[2];
  const double moved_s = static_cast<double>(step.counted(Counter::kNvmeReadBytes)) / 2e9 +
                         static_cast<double>(step.counted(Counter::kNvmeWriteBytes)) / 1e9;
  EXPECT_GE(static_cast<double>(step.counted(Counter::kNvmeWriteBytes)), 12 * kCount);
  // Reads and writes have a bandwidth of their own or share one: between both.
  EXPECT_GE(step.seconds, 0.6 * moved_s);
  EXPECT_LE(step.seconds, 1.01 * moved_s);
}

/// The first forward waits for the update of its own unit, though that has the last parameter too.
TEST(LentRehearsal, UpdatesWhatIsAcquiredFirstBeforeTheRest) {
  LentRehearsal request = equal_lent_run(Tier::kNvme);
  request.config.host_budget_bytes = kGiB;
  request.machine.drive.read_bytes_per_second = 2e9;
  request.machine.drive.write_bytes_per_second = 2e9;
  request.model.units.back().params[0].streamed = 0;
  request.events = recorded(kUnits - 1, 0.5, 0.5);
  request.events.insert(request.events.end() - 1, {.kind = Kind::kGradient, .of = kUnits - 1});
  const RehearsedStep step = rehearse_lent(request).steps[2];
  const double moved_s = static_cast<double>(step.counted(Counter::kNvmeReadBytes) +
                                             step.counted(Counter::kNvmeWriteBytes)) /
                         2e9;
  EXPECT_GT(step.acquire_s, 0);
  EXPECT_LT(step.acquire_s, 3.0 / kUnits * moved_s);
}

/// Each unit that comes and goes is copied for its forward and its backward.
TEST(LentRehearsal, BoundByCopies) {
  LentRehearsal request = equal_lent_run(Tier::kHost);
  request.machine.device.memory_bytes = 3 * (static_cast<std::uint64_t>(kUnitBytes) + kMiB);
  request.machine.device.to_device.bytes_per_second = 1e9;
  const RehearsedStep step = rehearse_lent(request).steps[2];
  const double copied = static_cast<double>(step.counted(Counter::kHostToDeviceBytes));
  EXPECT_GE(copied, 1.5 * kUnits * kUnitBytes);
  EXPECT_LE(copied, 2 * kUnits * kUnitBytes);
  expect_within(step.seconds, copied / 1e9, 0.01);
}

/// A state in memory is updated in step(), if the trainer says so: 28 bytes of AdamW's an element.
TEST(LentRehearsal, BoundByTheUpdateInMemory) {
  LentRehearsal request = equal_lent_run(Tier::kHost);
  request.update_at_once = true;
  request.machine.workers.bytes_per_second = 10e9;
  const RehearsedStep step = rehearse_lent(request).steps[2];
  const double job_s = step.workers_busy_s / static_cast<double>(request.machine.workers.threads);
  EXPECT_GT(job_s, 28 * kCount / 10e9 * 0.99);
  expect_within(step.step_s, job_s, 0.01);
  expect_within(step.seconds, job_s, 0.01);
}

/// A trainer with a thread of its own leaves the other cores to the update; one with as many as
/// there are cores shares them.
TEST(LentRehearsal, TakesItsThreadsFromTheWorkers) {
  LentRehearsal request = equal_lent_run(Tier::kNvme);
  request.machine.workers.bytes_per_second = 20e9;
  request.machine.workers_compute = true;
  request.config.host_budget_bytes = 3 * kGiB;
  double seconds[2];
  for (const std::size_t threads : {1, 4}) {
    request.events = recorded(kUnits, 0.02, 0.02);
    for (LentEvent& event : request.events) event.threads = threads;
    const RehearsedStep step = rehearse_lent(request).steps[2];
    seconds[threads == 4] = step.seconds;
  }
  EXPECT_LT(seconds[0], 0.85 * seconds[1]);
}

/// Memory that is lent, and sums of gradients on the drive.
TEST(LentRehearsal, PlaysLentParametersAndSums) {
  LentRehearsal request = equal_lent_run(Tier::kNvme);
  request.model = equal_params(kUnits, kUnitCount, /*lent=*/true);
  request.events = recorded(kUnits, kForward, kBackward, Kind::kGradient, /*streamed=*/false);
  const RehearsedRank lent = rehearse_lent(request);
  EXPECT_EQ(lent.counted(Counter::kHostToDeviceBytes), 0U);
  request.config.placement.grads = Tier::kNvme;
  request.events = recorded(kUnits, kForward, kBackward, Kind::kAddGradient, /*streamed=*/false);
  const RehearsedRank summed = rehearse_lent(request);
  const auto written = [](const RehearsedRank& rank) {
    return static_cast<double>(rank.steps[1].counted(Counter::kNvmeWriteBytes));
  };
  expect_within(written(summed) - written(lent), 2 * kCount, 0.01);
  // Backward makes gradients in their parameters' type, whatever the type is of what is lent.
  request.gradients = DType::kFloat32;
  expect_within(written(rehearse_lent(request)), written(summed), 0.01);
}

/// Waits until nothing goes on by itself any more: no work elsewhere, and no handler is ready.
void settle(Reactor& reactor) {
  const auto busy = [](const Reactor& its) -> Task<bool> { co_return its.external_work(); };
  // A handler makes the next one ready: each question waits for those that were ready before it.
  for (int quiet = 0; quiet < 200;) quiet = reactor.block_on(busy(reactor)) ? 0 : quiet + 1;
}

/// The same, but the trainer computes after whatever it does: what the engine begins then ends
/// before the trainer goes on, however fast that is.
std::vector<LentEvent> with_rests(const std::vector<LentEvent>& events) {
  std::vector<LentEvent> rested;
  for (const LentEvent& event : events) {
    if (event.kind == Kind::kCompute) continue;
    rested.push_back(event);
    rested.push_back({.kind = Kind::kCompute, .seconds = 1});
  }
  return rested;
}

/// Makes the steps of a recording with real bytes. Returns what was counted from the first step on
/// until all are durable.
std::vector<std::uint64_t> counted_in_a_run(const LentRehearsal& request,
                                            const std::string& directory) {
  const auto runtime = Runtime::create({.threads = 2, .trace_path = ""});
  const auto device = HostDevice::create(runtime->reactor, request.machine.device.memory_bytes,
                                         nullptr, &runtime->metrics);
  EngineConfig config = request.config;
  if (!config.store.empty()) config.store = {{directory}};
  const std::size_t count = request.model.units.size();
  std::vector<testing::TypedArray> memory;
  std::vector<TypedSpan<std::byte>> begun;  // the parameters' values, and then gradients
  for (const UnitSpec& unit : request.model.units)
    begun.push_back(memory.emplace_back(DType::kBFloat16, unit.count()).span());
  const auto engine = LentEngine::open(request.model, config, *runtime, begun, device.get());
  const auto counters = [&] {
    std::vector<std::uint64_t> all;
    for (const Counter counter : kLinks) all.push_back(runtime->metrics.value(counter));
    return all;
  };
  const std::vector<std::uint64_t> before = counters();
  const std::vector<GroupStep> groups(count, GroupStep{.learning_rate = 1e-3F});
  Host host;
  for (int i = 0; i < request.steps; ++i) {
    std::vector<TypedSpan<const std::byte>> gradients(count);
    std::vector<bool> summed(count);
    for (const LentEvent& event : request.events) {
      if (event.kind == Kind::kAcquire) engine->acquire(event.of, host);
      // A trainer that computes until all is quiet: which transfer ends first does not matter then.
      if (event.kind == Kind::kCompute) settle(runtime->reactor);
      if (event.kind == Kind::kRelease) engine->release(event.of, host);
      if (event.kind == Kind::kGradient) gradients[event.of] = memory[event.of].span();
      if (event.kind == Kind::kAddGradient) {
        engine->add_gradient(event.of, memory[event.of].span(), 1, !summed[event.of]);
        summed[event.of] = true;
      }
      if (event.kind != Kind::kStep) continue;
      StepOptions options{.blob = {}};
      options.groups = groups;
      options.update_at_once = request.update_at_once;
      engine->step(gradients, options);
    }
  }
  engine->wait_all_updated();
  if (!config.store.empty()) engine->make_durable();
  std::vector<std::uint64_t> after = counters();
  for (std::size_t c = 0; c < after.size(); ++c) after[c] -= before[c];
  return after;
}

/// What is played moves over each link the bytes that a run moves there.
TEST(LentRehearsal, MovesWhatARunMoves) {
  struct Case {
    const char* name;
    Placement placement;
    std::uint64_t host_budget_bytes;
    Kind gradient;
  };
  const auto placed = [](Tier params, Tier grads, Tier optimizer) {
    return Placement{.params = params, .grads = grads, .optimizer = optimizer};
  };
  using enum Tier;
  for (const Case& its :
       {Case{"all in host memory", placed(kHost, kHost, kHost), 0, Kind::kGradient},
        Case{"parameters that stay", placed(kDevice, kHost, kHost), 0, Kind::kGradient},
        Case{"state on the drive", placed(kHost, kHost, kNvme), 24 * kMiB, Kind::kGradient},
        Case{"all on the drive", placed(kNvme, kNvme, kNvme), 24 * kMiB, Kind::kAddGradient}}) {
    SCOPED_TRACE(its.name);
    const testing::ScratchDirectory scratch;
    constexpr std::uint64_t kSmall = 300'000;
    LentRehearsal request = equal_lent_run(its.placement.optimizer);
    request.model = equal_params(kUnits, kSmall);
    request.events = with_rests(recorded(kUnits, 1, 1, its.gradient));
    request.config.placement = its.placement;
    request.config.host_budget_bytes = its.host_budget_bytes;
    request.machine.workers.threads = 2;
    request.machine.device.memory_bytes =
        (its.placement.params == kDevice ? 2 * kUnits : 3) * (2 * kSmall + 64 * kKiB);
    request.update_at_once = its.placement.optimizer == kHost;
    const std::vector<std::uint64_t> run = counted_in_a_run(request, scratch.path() + "/store");
    const RehearsedRank rank = rehearse_lent(request);
    for (std::size_t c = 0; c < run.size(); ++c)
      EXPECT_EQ(rank.counted(kLinks[c]), run[c]) << to_string(kLinks[c]);
  }
}

TEST(LentRehearsal, SaysWhatIsWrongWithARecording) {
  LentRehearsal request = equal_lent_run(Tier::kHost);
  request.events.pop_back();
  EXPECT_THROW(rehearse_lent(request), Error);
  request = equal_lent_run(Tier::kHost);
  request.events.front().of = kUnits;
  EXPECT_THROW(rehearse_lent(request), Error);
  request = equal_lent_run(Tier::kHost);
  request.events.insert(request.events.begin(), {.kind = Kind::kRelease, .of = 0});
  EXPECT_THROW(rehearse_lent(request), Error);
  request.events.front() = {.kind = Kind::kWait, .of = kUnits};
  EXPECT_THROW(rehearse_lent(request), Error);
}

}  // namespace lent_rehearsal_test
}  // namespace ziggurat
