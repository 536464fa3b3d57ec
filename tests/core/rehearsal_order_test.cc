// SPDX-License-Identifier: Apache-2.0
// tests/core/rehearsal_order_test.cc: what is ready at one instant may run in any order, and rows
// of a copy may be played at once: no bit, and no byte of a link, depends on it.
#include <gmock/gmock.h>

#include "aio/simulated_engine.h"
#include "collectives/self_communicator.h"
#include "core/rehearsal/rehearsal.h"
#include "tests/core/lent_kinds.h"
#include "tests/core/lent_trainer.h"
#include "tests/core/rehearsed_units.h"
#include "tests/support/scratch_directory.h"

namespace ziggurat {
namespace rehearsal_order_test {

using namespace std::chrono_literals;
using namespace testing::rehearsed;

struct Setting {
  const char* name;
  const char* placement;
  int ranks;
  int stage;
  bool gpu;
  std::uint64_t host_bytes;
};
constexpr Setting kSettings[] = {
    {"records on NVMe", "params=host,grads=host,optimizer=nvme", 1, 0, false, kGiB},
    {"all on NVMe, a GPU", "all=nvme", 1, 0, true, kGiB},
    {"stage 3, GPUs", "params=host,grads=host,optimizer=nvme", 4, 3, true, 2 * kGiB},
    {"stage 2", "params=host,grads=host,optimizer=nvme", 2, 2, false, 2 * kGiB},
    {"stage 0, GPUs, in memory", "params=host,grads=host,optimizer=host", 2, 0, true, 3 * kGiB},
};

/// A machine on which everything takes its time.
RehearsalRequest request_of(const Setting& setting) {
  RehearsalRequest request = equal_run(Tier::kNvme);
  request.config.placement = parse_placement(setting.placement);
  request.config.strategy.zero_stage = setting.stage;
  request.config.host_budget_bytes = setting.host_bytes;
  request.costs.assign(kUnits, {.forward_s = 5e-3, .backward_s = 1e-2});
  request.machine.workers = {.threads = 4, .bytes_per_second = 40e9, .latency = 5us};
  const CostedLink link{.bytes_per_second = 25e9, .latency = 10us};
  request.machine.device.host_accessible = !setting.gpu;
  request.machine.device.to_device = request.machine.device.to_host = link;
  request.machine.device.own_memory = {.bytes_per_second = 2e12, .latency = 0us};
  request.machine.drive = {
      .read_bytes_per_second = 6e9, .write_bytes_per_second = 5e9, .latency = 100us};
  request.machine.network = {.ranks = setting.ranks,
                             .ranks_per_node = 2,
                             .within_node = {.bytes_per_s = 20e9, .latency = 5us},
                             .between_nodes = {.bytes_per_s = 10e9, .latency = 5us}};
  return request;
}

/// What a run decided: which bytes took which link, and what was made. What a step leaves to be
/// written is counted in the step in which it is, so only the sum of all steps is the same.
std::vector<std::uint64_t> decisions(const RehearsedRank& rank) {
  std::vector<std::uint64_t> all;
  for (const Counter link : kLinks) all.push_back(rank.counted(link));
  std::uint64_t sent = 0;
  for (const RehearsedStep& step : rank.steps) {
    sent += step.sent_in_node + step.sent_to_nodes;
    all.push_back(step.generation);
  }
  all.push_back(sent);
  return all;
}

/// Costs the rows of a copy at once, or each by itself.
TEST(RowsAtOnce, AreAsRowByRow) {
  struct Case {
    const char* name;
    int ranks, stage, hpz;
    Route route;
  };
  for (const Case& its :
       {Case{"stage 3", 8, 3, 0, Route::kDirect}, Case{"stage 3, in rings", 16, 3, 0, Route::kRing},
        Case{"stage 2", 8, 2, 0, Route::kDirect}, Case{"stage 0", 4, 0, 0, Route::kRing},
        Case{"hpZ", 8, 3, 4, Route::kDirect}}) {
    SCOPED_TRACE(its.name);
    RehearsalRequest request = request_of(
        {"", "params=host,grads=host,optimizer=nvme", its.ranks, its.stage, true, 2 * kGiB});
    request.config.strategy.hpz = its.hpz;
    request.machine.network.ranks_per_node = 4;
    request.machine.network.route = its.route;
    request.mirrored = true;
    const RehearsedRank at_once = rehearse(request).front();
    request.machine.device.row_by_row = true;
    const RehearsedRank by_row = rehearse(request).front();
    EXPECT_EQ(decisions(at_once), decisions(by_row));
    EXPECT_EQ(at_once.host.peak_bytes(), by_row.host.peak_bytes());
    for (std::size_t i = 0; i < by_row.steps.size(); ++i) {
      const RehearsedStep& one = at_once.steps[i];
      const RehearsedStep& other = by_row.steps[i];
      EXPECT_NEAR(one.seconds, other.seconds, 0.005 * other.seconds) << "step " << i;
      EXPECT_NEAR(one.acquire_s, other.acquire_s, 0.005 * other.seconds) << "step " << i;
      EXPECT_NEAR(one.gradient_s, other.gradient_s, 0.005 * other.seconds) << "step " << i;
    }
  }
}

/// Does jobs on the reactor's thread when their time in virtual time has passed.
class VirtualWorkers final : public Workers {
 public:
  explicit VirtualWorkers(Reactor& reactor) : reactor_(reactor) {}
  std::size_t threads() const noexcept override { return 3; }

 private:
  Task<> begin(Reactor&, Work work, const std::function<void()>& job, int, Turn) override {
    Signal over(reactor_);
    reactor_.clock().after(1us + Nanoseconds(work.bytes / 1024), [&over] { over.set(); });
    co_await over.wait();
    job();
  }

  Reactor& reactor_;
};

/// Trains a few steps with real bytes in virtual time, and returns when they were durable.
Nanoseconds trained_in_order_of(std::uint64_t seed, std::uint64_t host_bytes) {
  using namespace testing;
  const ModelSpec model = lent_model({1, 16'385, 600'000, 70'000}, DType::kBFloat16);
  Reactor reactor(Clock::Kind::kVirtual);
  reactor.clock().shuffle_ties(seed);
  reactor.shuffle_ready(seed);
  SimulatedDisk disk(kGiB, SimulatedDisk::Keeps::kAll);
  Runtime runtime(reactor);
  runtime.twin = std::make_unique<VirtualWorkers>(reactor);
  runtime.drive_node = [](const std::string&) { return -1; };
  runtime.drive_number = [](const std::string&) { return std::uint64_t{0}; };
  runtime.io_engine = [&](Reactor&, const std::string&) {
    SimulatedEngineOptions drive;
    drive.jitter = 0;
    return std::make_unique<SimulatedEngine>(reactor, disk, drive);
  };
  runtime.ranks = std::make_unique<SelfCommunicator>();
  const ScratchDirectory unused;
  EngineConfig config = config_of({StateFormat::kFp32, DType::kBFloat16}, Where::kNvme, unused);
  config.store = {{"store"}};
  config.host_budget_bytes = host_bytes;
  LentTrainer trainer(model, config.optimizer.state);
  config.counts_steps = true;
  const auto engine = LentEngine::open(model, config, runtime, trainer.lent());
  const LentStep steps[] = {
      {}, {.left_out = {1}}, {.left_out = {}, .written = {0, 2}}, {.left_out = {3}}, {}};
  for (const LentStep& step : steps) trainer.step(*engine, step);
  engine->make_durable();
  EXPECT_TRUE(trainer.same());
  return reactor.clock().now();
}

TEST(ReadyOrder, ChangesNoBits) {
  for (const std::uint64_t host_bytes : {20 * kMiB, 64 * kMiB}) {
    const Nanoseconds in_order = trained_in_order_of(0, host_bytes);
    for (std::uint64_t seed = 1; seed <= 12; ++seed) {
      SCOPED_TRACE(::testing::Message() << host_bytes << " bytes, seed " << seed);
      const Nanoseconds shuffled = trained_in_order_of(seed, host_bytes);
      EXPECT_NEAR(static_cast<double>(shuffled.count()), static_cast<double>(in_order.count()),
                  0.02 * static_cast<double>(in_order.count()));
    }
  }
}

}  // namespace rehearsal_order_test
}  // namespace ziggurat
