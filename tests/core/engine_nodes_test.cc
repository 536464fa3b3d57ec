// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_nodes_test.cc: the engine on a machine of two NUMA nodes: what it asks the
// kernel for, where leases, jobs and rings are, and that none of it changes a bit. The machine is
// described in words and its kernel is a recording one, so that any machine runs this.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include "aio/probe.h"
#include "base/memory_exhausted.h"
#include "tests/core/engine_harness.h"
#include "tests/core/equal_units.h"
#include "tests/support/recording_policy.h"

namespace ziggurat::testing {
namespace engine_nodes_test {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr const char* kOneNode = "pack:1 [numa] core:2 pu:1";
constexpr const char* kTwoNodes = "pack:2 [numa] core:1 pu:1";

/// Forty chunks of one size.
ModelSpec wide_model() { return equal_units("wide", 5, 1000); }

/// An engine whose store is in `directories`, and what was asked of the kernel.
struct Machine {
  Machine(const std::string& description, const ModelSpec& model, const EngineConfig& config,
          std::vector<int> drive_nodes)
      : policy(std::make_shared<test::RecordingPolicy>()) {
    RuntimeOptions options{.threads = 2, .trace_path = ""};
    options.topology = Topology::from_synthetic(description);
    options.memory_policy = policy;
    options.drive_node = [config, drive_nodes](const std::string& directory) {
      for (std::size_t i = 0; i < config.store.size(); ++i) {
        if (config.store[i].path == directory) return drive_nodes[i];
      }
      return -1;
    };
    options.io_engine = [this](Reactor& reactor, const std::string& directory) {
      cpu_set_t cpus;
      EXPECT_EQ(::sched_getaffinity(0, sizeof(cpus), &cpus), 0);
      ring_cpus.push_back(cpus);
      return choose_io_engine(reactor, directory);
    };
    runtime = Runtime::create(options);
    device = HostDevice::create(runtime->reactor, 8 * kMiB, nullptr, &runtime->metrics);
    engine = Engine::open(model, config, *runtime, *device, initialize);
  }
  std::uint64_t counted(Counter counter) const { return runtime->metrics.value(counter); }
  std::vector<int> nodes_asked_for() const {
    std::vector<int> nodes;
    for (const auto& call : policy->calls()) nodes.push_back(call.numa_node);
    return nodes;
  }

  std::shared_ptr<test::RecordingPolicy> policy;
  std::vector<cpu_set_t> ring_cpus;  // of the thread that made each ring
  std::unique_ptr<Runtime> runtime;
  std::unique_ptr<Device> device;
  std::unique_ptr<Engine> engine;
};

EngineConfig config_of(const std::string& directory, const char* placement,
                       std::uint64_t host_bytes) {
  EngineConfig config = small_config(directory);
  config.placement = parse_placement(placement);
  config.host_budget_bytes = host_bytes;
  config.clip_norm = 45.0F;
  return config;
}

constexpr const char* kDemo = "params=host,grads=host,optimizer=nvme";
constexpr std::uint64_t kHostBytes = 10 * kMiB;

TEST(EngineOnOneNode, AsksTheKernelForNothingAndPlacesNothing) {
  const ScratchDirectory directory;
  const ModelSpec model = wide_model();
  Machine machine(kOneNode, model, config_of(directory.path(), kDemo, kHostBytes), {0});
  train_step(*machine.engine, model, 0, 0.01F);
  machine.engine->make_durable();
  EXPECT_THAT(machine.policy->calls(), IsEmpty());
  for (const Counter counter : {Counter::kLeasesOnNode, Counter::kLeasesElsewhere,
                                Counter::kJobsOnNode, Counter::kJobsElsewhere})
    EXPECT_EQ(machine.counted(counter), 0U) << to_string(counter);
  EXPECT_THAT(machine.engine->description(), Each(Not(HasSubstr("NUMA"))));
}

struct NodesCase {
  const char* name;
  const char* placement;
  std::vector<int> drive_nodes;  // by directory of the store
  std::vector<int> asked_for;    // parts of host memory
  std::uint64_t host_bytes = kHostBytes;
  EngineConfig::Speculation speculation = EngineConfig::Speculation::kAuto;
};

class EngineOnTwoNodes : public ::testing::TestWithParam<NodesCase> {};

TEST_P(EngineOnTwoNodes, HasTheBitsOfPlainTraining) {
  const ScratchDirectory first;
  const ScratchDirectory second;
  const ModelSpec model = wide_model();
  EngineConfig config = config_of(first.path(), GetParam().placement, GetParam().host_bytes);
  if (GetParam().drive_nodes.size() > 1) config.store.push_back({second.path()});
  config.speculation = GetParam().speculation;
  PlainTraining plain(model, config.clip_norm);
  {
    Machine machine(kTwoNodes, model, config, GetParam().drive_nodes);
    EXPECT_EQ(machine.nodes_asked_for(), GetParam().asked_for);
    for (std::uint64_t step = 0; step < 5; ++step) {
      const float loudness = step % 3 == 1 ? 4.0F : 1.0F;  // and is clipped
      ASSERT_EQ(train_step(*machine.engine, model, step, 0.01F, {}, loudness).grad_norm,
                plain.step(step, 0.01F, loudness));
    }
    ASSERT_TRUE(same_params(*machine.engine, plain, model));
    machine.engine->make_durable();
    EXPECT_GT(machine.counted(Counter::kLeasesOnNode), 0U);
    if (!machine.runtime->worker_nodes.empty()) {  // a quota of less than two CPUs pins none
      EXPECT_GT(machine.counted(Counter::kJobsOnNode) + machine.counted(Counter::kJobsElsewhere),
                0U);
    }
    EXPECT_THAT(machine.engine->description(), Contains(HasSubstr("on NUMA node")));
  }
  Machine again(kOneNode, model, config, GetParam().drive_nodes);
  EXPECT_TRUE(again.engine->resumed());
  EXPECT_TRUE(same_params(*again.engine, plain, model)) << "a store knows no nodes";
}

INSTANTIATE_TEST_SUITE_P(
    Engine, EngineOnTwoNodes,
    ::testing::Values(
        NodesCase{"ADriveOnEach", kDemo, {0, 1}, {0, 1}},
        NodesCase{"BothDrivesOnTheSecond", kDemo, {1, 1}, {1}},
        NodesCase{"ADriveThatIsNotKnown", kDemo, {-1}, {0, 1}},
        NodesCase{"ADriveOfANodeWithoutWorkers", kDemo, {7, 7}, {0, 1}},
        NodesCase{"EverythingOnNvme", "all=nvme", {0, 1}, {0, 1}},
        NodesCase{"EverythingInMemory", "all=host", {0}, {0, 1}, 16 * kMiB},
        NodesCase{
            "Guesses", kDemo, {0, 1}, {0, 1}, kHostBytes, EngineConfig::Speculation::kAlways}),
    [](const auto& one) { return std::string(one.param.name); });

// The plan knows nothing of nodes: whatever fits one, fits two.
TEST(EngineOnTwoNodesAtItsSmallest, TrainsInEveryBudgetThatOneNodeTrainsIn) {
  const ModelSpec model = wide_model();
  for (const char* placement : {"all=host", kDemo}) {
    SCOPED_TRACE(placement);
    std::uint64_t smallest = 0;
    try {
      const ScratchDirectory directory;
      Machine machine(kTwoNodes, model, config_of(directory.path(), placement, kMiB), {-1});
      smallest = kMiB;
    } catch (const MemoryExhausted& error) {
      smallest = error.shortage().smallest_bytes;
    }
    for (const std::uint64_t more : {std::uint64_t{0}, 36 * kKiB, kMiB, 5 * kMiB}) {
      const std::uint64_t host_bytes = smallest + more;
      SCOPED_TRACE(format_bytes(host_bytes));
      const ScratchDirectory directory;
      PlainTraining plain(model, 45.0F);
      Machine machine(kTwoNodes, model, config_of(directory.path(), placement, host_bytes), {-1});
      for (std::uint64_t step = 0; step < 4; ++step)
        ASSERT_EQ(train_step(*machine.engine, model, step, 0.01F).grad_norm,
                  plain.step(step, 0.01F));
      ASSERT_TRUE(same_params(*machine.engine, plain, model));
      const Account account = machine.engine->host_account();
      EXPECT_LE(account.peak_bytes(), host_bytes);
    }
  }
}

TEST(EngineOnTwoNodesRings, AreMadeByAThreadOnTheirDrivesNode) {
  cpu_set_t here;
  ASSERT_EQ(::sched_getaffinity(0, sizeof(here), &here), 0);
  if (!CPU_ISSET(0, &here) || !CPU_ISSET(1, &here)) GTEST_SKIP() << "needs CPUs 0 and 1";
  const ModelSpec model = small_model();
  for (const int node : {0, 1}) {
    const ScratchDirectory directory;
    Machine machine(kTwoNodes, model, config_of(directory.path(), kDemo, 8 * kMiB), {node});
    ASSERT_EQ(machine.ring_cpus.size(), 1U);
    EXPECT_EQ(CPU_COUNT(&machine.ring_cpus[0]), 1);
    EXPECT_TRUE(CPU_ISSET(static_cast<unsigned>(node), &machine.ring_cpus[0]));
    cpu_set_t after;
    machine.runtime->reactor.block_on([](cpu_set_t& cpus) -> Task<> {
      EXPECT_EQ(::sched_getaffinity(0, sizeof(cpus), &cpus), 0);
      co_return;
    }(after));
    EXPECT_TRUE(CPU_EQUAL(&after, &here)) << "the engine's thread goes where it was";
  }
}

TEST(EngineOnTwoNodesNotes, SayWhereMemoryWorkersAndDrivesAreAndWhatWasRefused) {
  const ScratchDirectory first;
  const ScratchDirectory second;
  const ModelSpec model = wide_model();
  EngineConfig config = config_of(first.path(), kDemo, kHostBytes);
  config.store.push_back({second.path()});
  Machine machine(kTwoNodes, model, config, {0, -1});
  EXPECT_THAT(
      machine.engine->description(),
      AllOf(Contains(HasSubstr("host memory: ")), Contains(HasSubstr(" MiB on NUMA node 1")),
            Contains(HasSubstr("chunks and ")),
            Contains(HasSubstr("the drive of " + first.path() + " is on NUMA node 0")),
            Contains(HasSubstr("the NUMA node of the drive of " + second.path() + " is unknown"))));
}

}  // namespace engine_nodes_test
}  // namespace ziggurat::testing
