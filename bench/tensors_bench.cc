// SPDX-License-Identifier: Apache-2.0
// bench/tensors_bench.cc: what do opening, saving and loading cost the processor beside the bytes
// that they move? Runs one operation on a model of many small parameters. The ceiling is a cost per
// tensor that does not grow with their number. bench/tensors.py runs this program, and the command
// for the operations that the command has.
//
//   tensors_bench new|open|save|load|foreign PARAMETERS FOLDER [STATE FORMAT]
//
// Prints the seconds of user time of all threads. `save` needs what `new` left in the folder, and
// `load` what `save` left; `foreign` loads FOLDER/hf/model.safetensors.
#include <fmt/format.h>
#include <sys/resource.h>

#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "aio/io_engine.h"
#include "core/checkpoint/checkpoint_reader.h"
#include "core/checkpoint/checkpoint_save.h"
#include "core/checkpoint/safetensors_source.h"
#include "core/engine/engine.h"
#include "optimizer/state_format.h"
#include "tiers/device/host_device.h"

namespace {

using namespace ziggurat;

constexpr std::size_t kParamsAUnit = 16;  // a unit fills one tile, so it needs no padding
constexpr std::uint64_t kBudgetBytes = std::uint64_t{256} << 20;

ModelSpec model_of(std::size_t params) {
  ModelSpec model{.name = "tensors", .units = {}};
  for (std::size_t p = 0; p < params; ++p) {
    const std::size_t unit = p / kParamsAUnit;
    if (p % kParamsAUnit == 0)
      model.units.push_back({.name = fmt::format("block.{}", unit), .params = {}});
    model.units.back().params.push_back(
        {.name = fmt::format("block.{}.expert.{}.weight", unit, p % kParamsAUnit),
         .shape = {32, 32}});
  }
  return model;
}

double user_seconds() {
  rusage used{};
  if (::getrusage(RUSAGE_SELF, &used) != 0) throw std::runtime_error("getrusage");
  return static_cast<double>(used.ru_utime.tv_sec) +
         static_cast<double>(used.ru_utime.tv_usec) / 1e6;
}

/// Opens a checkpoint or a safetensors file on the reactor.
class Source {
 public:
  Source(Runtime& runtime, const std::string& path) : runtime_(runtime) {
    runtime.reactor.block_on([](Source& self, std::string from) -> Task<> {
      Runtime& run = self.runtime_;
      self.io_ = run.io_engine(run.reactor, from);
      if (SafetensorsSource::is_there(*self.io_, from)) {
        Task<std::unique_ptr<SafetensorsSource>> opening =
            SafetensorsSource::open({.reactor = run.reactor, .io = *self.io_}, from, "");
        self.source_ = co_await std::move(opening);
      } else {
        Task<std::string> finding =
            find_checkpoint({.reactor = run.reactor, .io = *self.io_}, from);
        std::string found = co_await std::move(finding);
        Task<std::unique_ptr<CheckpointReader>> opening =
            CheckpointReader::open({run.reactor, *run.workers, *self.io_}, std::move(found));
        self.source_ = co_await std::move(opening);
      }
    }(*this, path));
  }
  ~Source() {
    runtime_.reactor.block_on([](Source& self) -> Task<> {
      self.source_.reset();
      self.io_.reset();
      co_return;
    }(*this));
  }
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;
  StateSource& operator*() noexcept { return *source_; }

 private:
  Runtime& runtime_;
  std::unique_ptr<IoEngine> io_;
  std::unique_ptr<StateSource> source_;
};

class Bench {
 public:
  Bench(std::size_t params, std::string folder, StateFormat format)
      : model_(model_of(params)), folder_(std::move(folder)), format_(format) {}

  double run(const std::string& what) {
    if (what == "new") std::filesystem::remove_all(folder_ + "/store");
    if (what == "new" || what == "open") return timed([&] { open(); });
    if (what == "save") {
      open();
      std::filesystem::remove_all(folder_ + "/saved");
      return timed([&] { engine_->save_checkpoint({.folder = folder_ + "/saved", .resume = {}}); });
    }
    std::filesystem::remove_all(folder_ + "/loaded");
    if (what == "load") return timed([&] { load(folder_ + "/saved", {}); });
    if (what == "foreign") return timed([&] { load(folder_ + "/hf", {.weights_only = true}); });
    throw std::runtime_error("the operation is not known: give new, open, save, load or foreign");
  }

 private:
  static double timed(const std::function<void()>& work) {
    const double begin = user_seconds();
    work();
    return user_seconds() - begin;
  }
  EngineConfig config_of(const std::string& store) const {
    EngineConfig config;
    config.store = {{folder_ + "/" + store}};
    config.host_budget_bytes = kBudgetBytes;
    config.run_identity = config.numerics_fingerprint = "tensors";
    config.optimizer.state.format = format_;
    config.checkpoint.saves = true;
    return config;
  }
  void open() {
    const Initializer initial = [](UnitId, std::uint64_t first, std::span<float> values) {
      for (std::size_t i = 0; i < values.size(); ++i)
        values[i] = static_cast<float>((first + i) % 1000) / 1000;
    };
    engine_ = Engine::open(model_, config_of("store"), *runtime_, *device_, initial);
  }
  void load(const std::string& from, const LoadOptions& options) {
    Source source(*runtime_, from);
    engine_ = Engine::open(model_, config_of("loaded"), *runtime_, *device_, *source, options);
  }

  ModelSpec model_;
  std::string folder_;
  StateFormat format_;
  std::unique_ptr<Runtime> runtime_ = Runtime::create({.threads = 1, .trace_path = ""});
  std::unique_ptr<HostDevice> device_ = HostDevice::create(runtime_->reactor, kBudgetBytes);
  std::unique_ptr<Engine> engine_;
};

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc < 4)
      throw std::runtime_error(
          "usage: tensors_bench new|open|save|load|foreign PARAMETERS FOLDER [FORMAT]");
    const auto format = parse_state_format(argc > 4 ? argv[4] : "fp32");
    if (!format)
      throw std::runtime_error(fmt::format("the state format '{}' is not known; give one of {}",
                                           argv[4], fmt::join(state_format_names(), ", ")));
    std::filesystem::create_directories(argv[3]);
    fmt::print("{:.6f}\n", Bench(std::stoul(argv[2]), argv[3], *format).run(argv[1]));
  } catch (const std::exception& error) {
    fmt::print(stderr, "tensors_bench: {}\n", error.what());
    return 1;
  }
  return 0;
}
