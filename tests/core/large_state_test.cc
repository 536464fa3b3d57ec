// SPDX-License-Identifier: Apache-2.0
// tests/core/large_state_test.cc: a state of any size goes from a store to a checkpoint, from that
// into another store, and is cut anew for other ranks: at the speed of the drives, in memory that
// does not grow with it, and with every bit.
//
// Drives are simulated: their time is virtual, so that only what the engine leaves them idle for
// costs any, and what they hold is kept as repeated words, so that it may be larger than the
// machine. ZIGGURAT_STATE_GB is the larger of the two sizes that are compared, 1 unless it is
// given; the other is a quarter of it.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "aio/aligned_bytes.h"
#include "aio/simulated_engine.h"
#include "base/bytes.h"
#include "base/checksum.h"
#include "core/checkpoint/checkpoint_reader.h"
#include "core/checkpoint/checkpoint_save.h"
#include "core/checkpoint/chunk_runs.h"
#include "core/checkpoint/stored_state.h"
#include "core/engine/state/store_reshard.h"
#include "tests/core/engine_harness.h"

namespace ziggurat::testing {
namespace large_state_test {

constexpr std::uint64_t kStep = 7;
constexpr std::uint64_t kBytesPerElement = 12;
constexpr std::uint64_t kHostBytes = 256 * kMiB;
constexpr std::uint64_t kDeviceBytes = 128 * kMiB;

std::uint64_t largest_bytes() {
  const char* const given = std::getenv("ZIGGURAT_STATE_GB");
  return static_cast<std::uint64_t>(given == nullptr ? 1e9 : 1e9 * std::stod(given));
}

/// Units of 8 million elements, and a bias each whose size is no multiple of anything.
ModelSpec model_of(std::uint64_t state_bytes) {
  ModelSpec model{.name = "large", .units = {}};
  constexpr std::int64_t kRows = 4096;
  constexpr std::int64_t kColumns = 2048;
  const std::uint64_t units =
      std::max<std::uint64_t>(1, state_bytes / (kBytesPerElement * kRows * kColumns));
  for (std::uint64_t u = 0; u < units; ++u) {
    const std::string unit = fmt::format("unit{}", u);
    model.units.push_back(
        {.name = unit,
         .params = {{.name = unit + ".weight", .shape = {kRows, kColumns}, .decay = true},
                    {.name = unit + ".bias", .shape = {1021}, .decay = false}}});
  }
  return model;
}

/// Every array of every parameter has a value of its own, which changes every 4 million elements.
/// bf16 has it too, so that parameters are alike however they are rounded.
class Pattern final : public StateSource {
 public:
  static constexpr std::uint64_t kAlike = std::uint64_t{1} << 22;

  explicit Pattern(const ModelSpec& model) {
    const ChunkTable table(model, /*chunk_tiles=*/1, {}, Sharding::of(0, 0, 1, 0));
    const ChunkRuns runs(table);
    content_.model = model.name;
    content_.dtype = model.dtype;
    content_.state = table.state();
    content_.units = runs.units();
    content_.tensors = runs.tensors();
    content_.step = kStep;
    content_.run_identity = "large";
  }
  static float value(std::size_t tensor, std::uint64_t element) {
    const std::uint64_t mixed = mix_seed(tensor, element / kAlike);
    const float mantissa = 1 + static_cast<float>(mixed % 128) / 128;
    return std::ldexp(mantissa, static_cast<int>(mixed / 128 % 64) - 32);
  }
  const StateContent& content() const noexcept override { return content_; }
  Task<> read(std::size_t tensor, std::span<const TensorRun> runs,
              std::span<std::byte> array) override {
    for (const TensorRun& run : runs) {
      const auto values = std::span(reinterpret_cast<float*>(array.data()), array.size() / 4);
      for (std::uint64_t i = 0; i < run.count;) {
        const std::uint64_t same = std::min(run.count - i, kAlike - (run.first + i) % kAlike);
        std::ranges::fill(values.subspan(run.at + i, same), value(tensor, run.first + i));
        i += same;
      }
    }
    co_return;
  }
  std::string place() const override { return "the pattern"; }

 private:
  StateContent content_;
};

/// What this process has held at a time since this was made, without the simulated disk's files.
class PeakMemory {
 public:
  explicit PeakMemory(const SimulatedDisk& disk) : disk_(disk) {
    std::ofstream("/proc/self/clear_refs") << "5";
  }
  std::uint64_t bytes() const {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("VmHWM:"))
        return std::stoull(line.substr(6)) * kKiB - disk_.memory_bytes();
    }
    ADD_FAILURE() << "no VmHWM in /proc/self/status";
    return 0;
  }

 private:
  const SimulatedDisk& disk_;
};

struct Moved {
  double share = 0;  ///< of the drives' limit
  std::uint64_t memory_bytes = 0;
};
struct Outcome {
  Moved save, load, reshard;
};

/// A machine with a drive for stores and one for checkpoints.
class Machine {
 public:
  explicit Machine(std::uint64_t state_bytes) : model_(model_of(state_bytes)), pattern_(model_) {
    for (const StateTensor& tensor : pattern_.content().tensors)
      state_bytes_ += tensor.size_bytes();
  }

  Outcome run() {
    Outcome outcome;
    {
      const auto engine = open("first", pattern_);
      // Reads of the store, and writes of the checkpoint.
      outcome.save = moved("save", std::max(seconds_of_reads(), seconds_of_writes()),
                           [&] { engine->save_checkpoint({.folder = target_, .resume = {}}); });
    }
    remove("first");
    {
      const OpenCheckpoint saved(*this);
      std::unique_ptr<Engine> engine;
      // Reads of the checkpoint; writes of records, and of parameters in bf16.
      outcome.load = moved("load", std::max(seconds_of_reads(), 7.0 / 6 * seconds_of_writes()),
                           [&] { engine = open("second", *saved.reader); });
    }
    remove_checkpoint();
    expect_pattern("second");
    // Both on one drive.
    outcome.reshard =
        moved("reshard", seconds_of_reads() + seconds_of_writes(), [&] { reshard(); });
    expect_pattern("second");
    return outcome;
  }

 private:
  double seconds_of_reads() const {
    return static_cast<double>(state_bytes_) / SimulatedEngineOptions{}.read_bytes_per_second;
  }
  double seconds_of_writes() const {
    return static_cast<double>(state_bytes_) / SimulatedEngineOptions{}.write_bytes_per_second;
  }

  std::unique_ptr<IoEngine> drive_of(Reactor& reactor, const std::string& directory) {
    SimulatedEngineOptions options;
    options.drive = directory.starts_with(target_) ? target_drive_ : store_drive_;
    return std::make_unique<SimulatedEngine>(reactor, disk_, options);
  }

  EngineConfig config(const std::string& store) const {
    EngineConfig config = small_config(scratch_.path() + "/" + store);
    config.host_budget_bytes = kHostBytes;
    config.placement = {.params = Tier::kNvme, .grads = Tier::kNvme, .optimizer = Tier::kNvme};
    config.checkpoint.saves = true;
    config.checkpoint.stall_max_s =
        1e300;  // workers take no virtual time: a limit would pass beside them
    config.run_identity = "large";
    return config;
  }

  std::unique_ptr<Engine> open(const std::string& store, StateSource& from) {
    return Engine::open(model_, config(store), *runtime_, *device_, from, {});
  }

  Nanoseconds now() {
    return runtime_->reactor.block_on([](Reactor& reactor) -> Task<Nanoseconds> {
      co_return reactor.clock().now();
    }(runtime_->reactor));
  }
  Moved moved(const char* what, double limit_seconds, const std::function<void()>& action) {
    const PeakMemory peak(disk_);
    const Nanoseconds begin = now();
    action();
    const double seconds = 1e-9 * static_cast<double>((now() - begin).count());
    const Moved result{.share = limit_seconds / seconds, .memory_bytes = peak.bytes()};
    fmt::print("{} of {}: {:.3f} s, {:.2f} of the drives' limit; peak memory {}\n", what,
               format_bytes(state_bytes_), seconds, result.share,
               format_bytes(result.memory_bytes));
    return result;
  }

  struct OpenCheckpoint {
    explicit OpenCheckpoint(Machine& of) : machine(of) {
      machine.runtime_->reactor.block_on([](OpenCheckpoint& self) -> Task<> {
        Runtime& runtime = *self.machine.runtime_;
        const std::string directory = self.machine.target_ + "/" + checkpoint_name(kStep);
        self.io = runtime.io_engine(runtime.reactor, directory);
        Task<std::unique_ptr<CheckpointReader>> opening = CheckpointReader::open(
            {.reactor = runtime.reactor, .workers = *runtime.workers, .io = *self.io}, directory);
        self.reader = co_await std::move(opening);
      }(*this));
    }
    ~OpenCheckpoint() {
      machine.runtime_->reactor.block_on([](OpenCheckpoint& self) -> Task<> {
        self.reader.reset();
        self.io.reset();
        co_return;
      }(*this));
    }
    OpenCheckpoint(const OpenCheckpoint&) = delete;
    Machine& machine;
    std::unique_ptr<IoEngine> io;
    std::unique_ptr<CheckpointReader> reader;
  };

  void reshard() {
    StoreReshard store(*runtime_, {{scratch_.path() + "/second"}});
    const StoreReshard::Result result = store.run({.model = store.model(),
                                                   .run_identity = "large",
                                                   .ranks = 3,
                                                   .strategy = {.zero_stage = 2},
                                                   .format = {},
                                                   .host_budget_bytes = kHostBytes});
    EXPECT_TRUE(result.changed);
  }

  /// Reads the whole store, whoever has which part of it.
  void expect_pattern(const std::string& store) {
    runtime_->reactor.block_on([](Machine& self, const std::string& directory) -> Task<> {
      Runtime& runtime = *self.runtime_;
      const auto io = runtime.io_engine(runtime.reactor, directory);
      Task<std::unique_ptr<StoredState>> opening =
          StoredState::open(runtime.reactor, *runtime.workers,
                            {{.io = *io, .observers = {}, .directory = directory}});
      const std::unique_ptr<StoredState> found = co_await std::move(opening);
      EXPECT_EQ(found->content().tensors, self.pattern_.content().tensors);
      EXPECT_EQ(found->content().step, kStep);
      for (std::size_t t = 0; t < found->content().tensors.size(); ++t)
        co_await self.expect_tensor(*found, t);
    }(*this, scratch_.path() + "/" + store));
  }
  Task<> expect_tensor(StoredState& found, std::size_t tensor) {
    constexpr std::uint64_t kAtOnce = 1 << 20;
    const StateTensor& its = found.content().tensors[tensor];
    AlignedPool memory;
    for (std::uint64_t first = 0; first < its.count(); first += kAtOnce) {
      const TensorRun run{.first = first, .count = std::min(kAtOnce, its.count() - first), .at = 0};
      const AlignedBytes got = memory.take(run.count * 4);
      const AlignedBytes expected = memory.take(run.count * 4);
      co_await found.read(tensor, std::span(&run, 1), got.span());
      co_await pattern_.read(tensor, std::span(&run, 1), expected.span());
      const bool same = std::ranges::equal(got.span(), expected.span());
      EXPECT_TRUE(same) << its.name << " from " << first;
      if (!same) co_return;
    }
  }

  /// All files in a directory of the simulated disk and below it.
  void remove_in(const std::string& directory) {
    runtime_->reactor.block_on([](Machine& self, const std::string& from) -> Task<> {
      const auto io = self.drive_of(self.runtime_->reactor, from);
      for (const std::string& name : io->names_in(from)) io->remove(from + "/" + name);
      co_return;
    }(*this, directory));
  }
  void remove(const std::string& store) { remove_in(scratch_.path() + "/" + store); }
  void remove_checkpoint() { remove_in(target_ + "/" + checkpoint_name(kStep)); }

  ScratchDirectory scratch_;
  const std::string target_ = scratch_.path() + "/target";
  ModelSpec model_;
  Pattern pattern_;
  std::uint64_t state_bytes_ = 0;
  SimulatedDisk disk_{std::uint64_t{1} << 50, SimulatedDisk::Keeps::kAll};
  DriveBusyUntil store_drive_ = std::make_shared<Nanoseconds>(0);
  DriveBusyUntil target_drive_ = std::make_shared<Nanoseconds>(0);
  std::unique_ptr<Runtime> runtime_ = Runtime::create(
      {.threads = 2,
       .trace_path = "",
       .io_engine = [this](Reactor& reactor,
                           const std::string& directory) { return drive_of(reactor, directory); },
       .clock = Clock::Kind::kVirtual});
  std::unique_ptr<Device> device_ =
      HostDevice::create(runtime_->reactor, kDeviceBytes, nullptr, &runtime_->metrics);
};

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::uint64_t kFreedBytes = 256 * kMiB;  // what sanitizers keep of freed memory
#else
constexpr std::uint64_t kFreedBytes = 0;
#endif

TEST(LargeState, MovesAtTheDrivesSpeedInMemoryThatDoesNotGrow) {
  const std::uint64_t bytes = largest_bytes();
  const Outcome small = Machine(bytes / 4).run();
  const Outcome large = Machine(bytes).run();
  for (const auto& [a, b] : {std::pair{small.save, large.save}, std::pair{small.load, large.load},
                             std::pair{small.reshard, large.reshard}}) {
    EXPECT_GT(b.share, 0.8);
    // Tables have an entry a record and a tensor: less than a thousandth. How many transfers are
    // under way at a time differs from run to run.
    EXPECT_LT(b.memory_bytes, a.memory_bytes + bytes / 1000 + 64 * kMiB + kFreedBytes);
  }
}

}  // namespace large_state_test
}  // namespace ziggurat::testing
