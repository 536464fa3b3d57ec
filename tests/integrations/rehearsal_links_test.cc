// SPDX-License-Identifier: Apache-2.0
// tests/integrations/rehearsal_links_test.cc: the reference trainer for ten steps, with real bytes,
// files, threads and sockets, and its rehearsal: the same bytes take each link in the same order.
//
// An order is that in which transfers are begun: of a file's reads, of its writes, of a stream's
// copies, of the calls of a communicator. Which of two ends first is decided by drives and by the
// machine's scheduler. So reads end in order here, and so do writes
// (tests/support/recorded_links.h), one worker does the jobs, and the trainer computes until all is
// quiet (tests/support/paced_engine.h). Between two files of a drive there is no order: which of
// them is written first depends on how long a job takes.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "aio/probe.h"
#include "base/bytes.h"
#include "collectives/exchange/exchange_communicator.h"
#include "core/engine/engine.h"
#include "core/rehearsal/rehearsal.h"
#include "tests/collectives/tcp_ranks.h"
#include "tests/integrations/gpt_fixture.h"
#include "tests/support/paced_engine.h"
#include "tests/support/recorded_links.h"
#include "tests/support/scratch_directory.h"

namespace ziggurat {
namespace rehearsal_links_test {

using namespace std::chrono_literals;
using testing::LinkLog;

constexpr int kSteps = 10;
constexpr Counter kBytes[] = {Counter::kNvmeReadBytes,     Counter::kNvmeWriteBytes,
                              Counter::kHostToDeviceBytes, Counter::kDeviceToHostBytes,
                              Counter::kStateReadBytes,    Counter::kStateWriteBytes,
                              Counter::kOptimizerBytes};

struct Setting {
  const char* placement;
  std::uint64_t host_bytes;
  std::uint64_t device_bytes;  ///< beside the trainer's
  int ranks = 1;
  int stage = 0;
  int micro_batches = 1;
  gpt::ActivationCheckpointing checkpointing = gpt::ActivationCheckpointing::kBlock;
};

using enum gpt::ActivationCheckpointing;
constexpr Setting kSettings[] = {
    {"params=host,grads=host,optimizer=nvme", 64 * kMiB, 16 * kMiB},
    {"params=host,grads=host,optimizer=nvme", 16 * kMiB, 16 * kMiB, 1, 0, 2},
    {"params=host,grads=host,optimizer=host", 64 * kMiB, 8 * kMiB},
    {"params=host,grads=host,optimizer=host", 64 * kMiB, 16 * kMiB, 1, 0, 3, kOff},
    {"params=host,grads=nvme,optimizer=nvme", 32 * kMiB, 16 * kMiB},
    {"params=nvme,grads=host,optimizer=nvme", 32 * kMiB, 16 * kMiB, 1, 0, 1, kOff},
    {"params=nvme,grads=nvme,optimizer=nvme", 64 * kMiB, 16 * kMiB},
    {"params=nvme,grads=nvme,optimizer=nvme", 16 * kMiB, 8 * kMiB, 1, 0, 2},
    {"params=host,grads=host,optimizer=nvme", 64 * kMiB, 16 * kMiB, 2, 3},
    {"params=host,grads=host,optimizer=nvme", 64 * kMiB, 16 * kMiB, 2, 2, 2},
    {"params=host,grads=host,optimizer=host", 64 * kMiB, 16 * kMiB, 2, 3, 1, kOff},
    {"params=nvme,grads=host,optimizer=nvme", 64 * kMiB, 16 * kMiB, 2, 0},
};

/// What a rank did.
struct Ran {
  std::map<std::string, std::uint64_t> bytes;  ///< by link
  LinkLog order;
};

gpt::ModelConfig model_config() {
  return {.layers = 4, .width = 128, .heads = 4, .context_max = 64};
}

gpt::RunShape shape_of(const Setting& setting) {
  return {.batch = 1,
          .accumulate = setting.micro_batches,
          .context = 16,
          .checkpointing = setting.checkpointing};
}

EngineConfig config_of(const Setting& setting, const std::string& directory) {
  EngineConfig config;
  config.store = {{directory}};
  config.placement = parse_placement(setting.placement);
  config.host_budget_bytes = setting.host_bytes;
  config.clip_norm = 0;  // a rehearsal never clips
  config.strategy.zero_stage = setting.stage;
  config.reduce_bucket_elements = 64 << 10;
  const TrainerNeed need = gpt::Trainer::need(model_config(), shape_of(setting), 1);
  config.trainer_device_bytes = need.device_bytes;
  config.trainer_held_units = need.held;
  return config;
}

std::uint64_t device_bytes(const Setting& setting) {
  return setting.device_bytes +
         round_up(gpt::Trainer::workspace_bytes(model_config(), shape_of(setting), 1), 64 * kKiB);
}

/// Adds the copies in a trace, by stream.
void read_copies(const std::string& path, LinkLog& order) {
  std::map<int, std::string> streams;
  for (const nlohmann::json& event : nlohmann::json::parse(std::ifstream(path))) {
    if (event.at("name") == "thread_name") {
      const std::string track = event.at("args").at("name");
      if (track.starts_with("copies: ")) streams[event.at("tid")] = track;
    } else if (event.at("ph") == "X" && streams.contains(event.at("tid"))) {
      order[streams[event.at("tid")]].push_back(
          fmt::format("{}: {}", event.at("name").get<std::string>(),
                      event.at("args").at("id").get<std::uint64_t>()));
    }
  }
}

/// A rank's runtime, whose links are written down.
struct RecordedRuntime {
  explicit RecordedRuntime(std::string its_trace) : trace(std::move(its_trace)) {
    RuntimeOptions options{.threads = 1, .trace_path = trace, .clock = Clock::Kind::kVirtual};
    options.io_engine = [this, choose = IoEngineFactory(ChooseIoEngine())](
                            Reactor& reactor, const std::string& directory) {
      return std::make_unique<testing::RecordedDrive>(choose(reactor, directory), order);
    };
    runtime = Runtime::create(options);
  }
  std::string trace;
  LinkLog order;
  std::unique_ptr<Runtime> runtime;
};

/// Connects ranks over loopback.
void connect(std::vector<std::unique_ptr<RecordedRuntime>>& ranks) {
  if (ranks.size() == 1) return;
  std::vector<Reactor*> reactors;
  for (const auto& rank : ranks) reactors.push_back(&rank->runtime->reactor);
  std::vector<TcpOptions> options = connected_options(reactors);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    options[i].timeout = 24h;  // virtual time passes quickly
    RecordedRuntime& its = *ranks[i];
    its.runtime->reactor.block_on([](RecordedRuntime& rank, TcpOptions& given) -> Task<> {
      Runtime& runtime = *rank.runtime;
      auto sockets = std::make_unique<ExchangeCommunicator>(ExchangeTransport::create(
          runtime.reactor, *runtime.workers, over_sockets(runtime.reactor, std::move(given))));
      runtime.ranks = std::make_unique<testing::RecordedRanks>(std::move(sockets), rank.order);
      co_return;
    }(its, options[i]));
  }
}

void train(RecordedRuntime& its, const Setting& setting, const std::string& directory, Ran& ran) {
  Runtime& runtime = *its.runtime;
  const gpt::ModelConfig model = model_config();
  const gpt::RunShape shape = shape_of(setting);
  const auto device = HostDevice::create(runtime.reactor, device_bytes(setting),
                                         runtime.trace.get(), &runtime.metrics);
  const auto engine = Engine::open(gpt::make_spec(model), config_of(setting, directory), runtime,
                                   *device, gpt::make_initializer(model, 1));
  {
    testing::PacedEngine paced(*engine, runtime.reactor, gpt::kEmbeddingUnit);
    gpt::Trainer trainer(paced, *device, *runtime.workers, model, shape);
    for (const Counter link : kBytes)
      ran.bytes[std::string(to_string(link))] = runtime.metrics.value(link);
    for (int step = 0; step < kSteps; ++step) {
      std::vector<gpt::Batch> batches;
      for (std::int64_t k = 0; k < shape.accumulate; ++k)
        batches.push_back(gpt::make_batch(shape, static_cast<std::uint64_t>(100 * step + k)));
      const StepOptions options{.learning_rate = 1e-3F, .blob = {}};
      paced.prepare_step(options);
      trainer.forward_backward(batches);
      paced.step(options);
    }
    engine->make_durable();
    for (const Counter link : kBytes) {
      std::uint64_t& bytes = ran.bytes[std::string(to_string(link))];
      bytes = runtime.metrics.value(link) - bytes;
    }
  }
  engine->close();
}

/// Returns what rank 0 did.
Ran really(const Setting& setting) {
  const testing::ScratchDirectory scratch;
  std::vector<std::unique_ptr<RecordedRuntime>> ranks;
  for (int rank = 0; rank < setting.ranks; ++rank)
    ranks.push_back(std::make_unique<RecordedRuntime>(scratch.path() + "/trace" +
                                                      std::to_string(rank) + ".json"));
  connect(ranks);
  std::vector<Ran> ran(ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        train(*ranks[rank], setting, scratch.path(), ran[rank]);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::string trace = ranks.front()->trace;
  Ran first = std::move(ran.front());
  for (const auto& rank : ranks) rank->runtime.reset();
  first.order = std::move(ranks.front()->order);
  read_copies(trace, first.order);
  return first;
}

Ran rehearsed(const Setting& setting) {
  const testing::ScratchDirectory scratch;
  Ran ran;
  RehearsalRequest request;
  request.model = gpt::make_spec(model_config());
  request.config = config_of(setting, "store");
  request.machine.workers = {.threads = 1, .bytes_per_second = 2e9, .latency = 10us};
  const CostedLink link{.bytes_per_second = 4e9, .latency = 5us};
  request.machine.device = {.memory_bytes = device_bytes(setting),
                            .host_accessible = true,
                            .to_device = link,
                            .to_host = link,
                            .own_memory = link};
  request.machine.drive = {
      .read_bytes_per_second = 1e9, .write_bytes_per_second = 5e8, .latency = 100us};
  request.machine.network = {.ranks = setting.ranks,
                             .ranks_per_node = setting.ranks,
                             .within_node = {.bytes_per_s = 1e9, .latency = 50us},
                             .between_nodes = {}};
  request.costs.assign(request.model.units.size(), {.forward_s = 1, .backward_s = 1});
  request.costs.front().between_s = 1;
  request.steps = kSteps;
  request.trace_path = scratch.path() + "/trace.json";
  request.around_drive = [&](int rank,
                             std::unique_ptr<IoEngine> drive) -> std::unique_ptr<IoEngine> {
    if (rank != 0) return drive;
    return std::make_unique<testing::RecordedDrive>(std::move(drive), ran.order);
  };
  request.around_ranks = [&](std::unique_ptr<Communicator> ranks) -> std::unique_ptr<Communicator> {
    if (ranks->rank() != 0 || setting.ranks == 1) return ranks;
    return std::make_unique<testing::RecordedRanks>(std::move(ranks), ran.order);
  };
  const RehearsedRank rank = rehearse(request).front();
  for (const Counter counter : kBytes)
    ran.bytes[std::string(to_string(counter))] = rank.counted(counter);
  read_copies(request.trace_path, ran.order);
  return ran;
}

/// Where parameters are on a drive, two units may be on their way, and the one whose reads end
/// first is copied first. Among ranks the one that all have updated first is read first. Only which
/// transfers there are is compared then.
void forget_order_of_completions(const Setting& setting, LinkLog& order) {
  if (parse_placement(setting.placement).params != Tier::kNvme) return;
  for (auto& [link, transfers] : order) {
    if (link.starts_with("copies") || (setting.ranks > 1 && link.starts_with("drive reads")))
      std::ranges::sort(transfers);
  }
}

class RehearsalLinks : public ::testing::TestWithParam<Setting> {};

TEST_P(RehearsalLinks, AreThoseOfARealRun) {
  Ran real = really(GetParam());
  Ran played = rehearsed(GetParam());
  forget_order_of_completions(GetParam(), real.order);
  forget_order_of_completions(GetParam(), played.order);
  EXPECT_EQ(played.bytes, real.bytes);
  for (const auto& [link, transfers] : real.order) {
    SCOPED_TRACE(link);
    const auto other = played.order.find(link);
    ASSERT_NE(other, played.order.end());
    EXPECT_EQ(other->second.size(), transfers.size());
    for (std::size_t i = 0; i < std::min(transfers.size(), other->second.size()); ++i)
      ASSERT_EQ(other->second[i], transfers[i]) << "transfer " << i << " of " << transfers.size();
  }
  EXPECT_EQ(played.order.size(), real.order.size());
}

INSTANTIATE_TEST_SUITE_P(Settings, RehearsalLinks, ::testing::ValuesIn(kSettings));

}  // namespace rehearsal_links_test
}  // namespace ziggurat
