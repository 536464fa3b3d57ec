// SPDX-License-Identifier: Apache-2.0
// bench/gpt_bench.cc: how fast is the reference trainer's forward and backward, with parameters in
// RAM and no optimizer?
//
// The ceiling is the time of the matrix products alone, at the speed of one large oneDNN product on
// the same threads, measured in this run.
//   gpt_bench [--model gpt2-small] [--batch 2] [--accumulate 4] [--context 256] [--threads 2]
//   [--steps 5] [--json FILE]
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/bytes.h"
#include "base/error.h"
#include "base/runtime/reactor.h"
#include "base/runtime/worker_pool.h"
#include "core/engine/engine.h"
#include "integrations/gpt/matmul.h"
#include "integrations/gpt/trainer.h"
#include "tests/support/ram_engine.h"
#include "tiers/device/host_device.h"

namespace {

using namespace ziggurat;

// Wall time, and CPU time of all threads, which still means something on a busy machine.
struct Seconds {
  double wall;
  double cpu;
};

Seconds seconds_of(const std::function<void()>& action) {
  const auto cpu = [] {
    timespec time{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  const auto start = std::chrono::steady_clock::now();
  const double cpu_start = cpu();
  action();
  return {std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(),
          cpu() - cpu_start};
}

Seconds median(const std::vector<Seconds>& times) {
  std::vector<double> wall;
  std::vector<double> cpu;
  for (const Seconds& time : times) {
    wall.push_back(time.wall);
    cpu.push_back(time.cpu);
  }
  const auto middle = static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(wall.begin(), wall.begin() + middle, wall.end());
  std::nth_element(cpu.begin(), cpu.begin() + middle, cpu.end());
  return {wall[times.size() / 2], cpu[times.size() / 2]};
}

// Returns the GF/s by wall time, and by CPU time (of one core), of a product large enough to hide
// every edge: 512 x 768 x 3072, with the trainer's tiles, all threads at once.
Seconds matmul_ceiling(WorkerPool& workers, const gpt::ModelConfig& model) {
  constexpr std::int64_t kRows = 512;
  const gpt::MatmulShape shape{.m = kRows,
                               .k = model.width,
                               .n = model.hidden(),
                               .a = {model.width, false},
                               .b = {model.hidden(), false},
                               .leading_c = model.hidden()};
  const gpt::TiledMatmul matmul(shape, workers.threads());
  const auto threads = workers.threads();
  std::vector<bf16> a(static_cast<std::size_t>(shape.m * shape.k), float_to_bf16(0.5F));
  std::vector<bf16> b(static_cast<std::size_t>(shape.k * shape.n), float_to_bf16(0.25F));
  std::vector<float> tiles(threads *
                           static_cast<std::size_t>(gpt::TiledMatmul::tile_elements_max()));
  const auto wide_size = gpt::wide_elements_tiled(shape);
  std::vector<float> wide(threads * static_cast<std::size_t>(wide_size.a + wide_size.b));
  const auto run = [&] {
    workers.run_team([&](Team& team) {
      const auto at = team.index() * static_cast<std::size_t>(wide_size.a + wide_size.b);
      const gpt::WideScratch scratch{
          std::span(wide).subspan(at, static_cast<std::size_t>(wide_size.a)),
          std::span(wide).subspan(at + static_cast<std::size_t>(wide_size.a),
                                  static_cast<std::size_t>(wide_size.b))};
      float* tile = tiles.data() +
                    team.index() * static_cast<std::size_t>(gpt::TiledMatmul::tile_elements_max());
      team.for_each(matmul.tile_count(), [&](std::size_t i) {
        matmul.compute(i, team.index(), a.data(), b.data(), tile, scratch);
      });
    });
  };
  run();
  std::vector<Seconds> times;
  for (int i = 0; i < 15; ++i) times.push_back(seconds_of(run));
  const Seconds time = median(times);
  const double flops = 2.0 * static_cast<double>(shape.m * shape.k * shape.n);
  return {flops / time.wall / 1e9, flops / time.cpu / 1e9};
}

// Returns twice the multiply-adds of a step's products: forward, its recomputation without the last
// projection, and both gradients.
double matmul_flops(const gpt::ModelConfig& m, const gpt::RunShape& s) {
  const auto width = static_cast<double>(m.width);
  const double block_forward = 12 * width * width;
  const bool again = s.checkpointing == gpt::ActivationCheckpointing::kBlock;
  const double block = block_forward * 3 + (again ? 8 * width * width : 0);
  const double attention =
      // half of QK^T and PV, because attention is causal
      static_cast<double>(s.context) * width * (again ? 4.5 : 3.5);
  const double head = 3 * width * static_cast<double>(m.vocabulary);
  return 2 * static_cast<double>(s.tokens_per_step()) *
         (static_cast<double>(m.layers) * (block + attention) + head);
}

gpt::Batch sample_batch(const gpt::RunShape& shape, std::size_t seed) {
  gpt::Batch batch;
  for (std::int64_t i = 0; i < shape.rows(); ++i) {
    batch.inputs.push_back(
        static_cast<std::uint8_t>((static_cast<std::size_t>(i) * 31 + seed) % 251));
    batch.targets.push_back(
        static_cast<std::uint8_t>((static_cast<std::size_t>(i + 1) * 31 + seed) % 251));
  }
  return batch;
}

int run(int argc, char** argv) {
  std::string model_name = "gpt2-small";
  std::string json_path;
  gpt::RunShape shape;
  std::size_t threads = 2;
  int steps = 5;
  bool no_checkpointing = false;
  CLI::App app{"Measures the speed of the reference trainer's forward and backward"};
  app.add_option("--model", model_name);
  app.add_option("--batch", shape.batch);
  app.add_option("--accumulate", shape.accumulate);
  app.add_option("--context", shape.context);
  app.add_option("--threads", threads)->check(CLI::Range(1, 1024));
  app.add_option("--steps", steps)->check(CLI::Range(1, 1000));
  app.add_option("--json", json_path);
  app.add_flag("--no-checkpointing", no_checkpointing);
  CLI11_PARSE(app, argc, argv);
  if (no_checkpointing) shape.checkpointing = gpt::ActivationCheckpointing::kOff;

  const gpt::ModelConfig model = gpt::parse_model(model_name);
  WorkerPool workers({.threads = threads, .cpus = {}, .trace = nullptr});
  Reactor reactor;
  const std::uint64_t workspace = gpt::Trainer::workspace_bytes(model, shape, threads);
  const auto device = HostDevice::create(reactor, workspace + kMiB);
  testing::RamEngine engine(gpt::make_spec(model), {}, 1.0F, gpt::make_initializer(model, 1));
  gpt::Trainer trainer(engine, *device, workers, model, shape);

  std::vector<gpt::Batch> batches;
  for (std::int64_t k = 0; k < shape.accumulate; ++k)
    batches.push_back(sample_batch(shape, static_cast<std::size_t>(k)));
  const auto step = [&] {
    const double loss = trainer.forward_backward(batches);
    if (!std::isfinite(loss)) throw Error(ErrorCode::kDataLoss, "the loss is not finite");
    engine.drop_gradients();
  };
  step();  // checks that the loss is finite, and warms up
  const Seconds before = matmul_ceiling(workers, model);
  const gpt::ComputeSeconds seconds_before = trainer.compute_seconds();
  std::vector<Seconds> times;
  for (int i = 0; i < steps; ++i) times.push_back(seconds_of(step));
  const gpt::ComputeSeconds seconds = trainer.compute_seconds();
  const Seconds after = matmul_ceiling(workers, model);
  const Seconds ceiling{std::max(before.wall, after.wall), std::max(before.cpu, after.cpu)};

  const Seconds time = median(times);
  const double gflop = matmul_flops(model, shape) / 1e9;
  const nlohmann::json result = {
      {"model", gpt::to_string(model)},
      {"tokens_per_step", shape.tokens_per_step()},
      {"threads", threads},
      {"numerics", gpt::numerics_fingerprint()},
      {"workspace_bytes", workspace},
      {"step_seconds_median", time.wall},
      {"step_cpu_seconds_median", time.cpu},
      {"tokens_per_second", static_cast<double>(shape.tokens_per_step()) / time.wall},
      {"forward_seconds", (seconds.forward - seconds_before.forward) / steps},
      {"backward_seconds", (seconds.backward - seconds_before.backward) / steps},
      {"matmul_gflop", gflop},
      {"gflops",
       {{"step", gflop / time.wall},
        {"ceiling", ceiling.wall},
        {"share", gflop / time.wall / ceiling.wall}}},
      {"gflops_per_cpu_second",
       {{"step", gflop / time.cpu},
        {"ceiling", ceiling.cpu},
        {"share", gflop / time.cpu / ceiling.cpu}}},
  };
  fmt::print("{}\n", result.dump(2));
  if (!json_path.empty()) std::ofstream(json_path) << result.dump(2) << '\n';
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const Error& error) {
    fmt::print(stderr, "gpt_bench: {}\n", error.what());
    return error.code() == ErrorCode::kInvalidArgument ? 2 : 1;
  }
}
