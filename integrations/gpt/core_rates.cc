// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/core_rates.cc: products, attention, kernels, passes and copies, each for a
// while.
#include "integrations/gpt/core_rates.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <ctime>
#include <functional>
#include <limits>
#include <vector>

#include "base/bytes.h"
#include "core/plan/machines/machine.h"
#include "core/plan/strategies/step_time.h"
#include "integrations/gpt/attention.h"
#include "integrations/gpt/block.h"
#include "integrations/gpt/matmul.h"
#include "integrations/gpt/trainer_space.h"
#include "tiers/pool/host_mapping.h"

namespace ziggurat::gpt {
namespace {

constexpr std::size_t kTimesMin = 3;
constexpr std::size_t kPassBytes = 64 * kMiB;  // beyond the caches of a core, and of most sockets
constexpr std::size_t kPassPieceBytes = kMiB;
constexpr std::int64_t kHidden = 1024;
constexpr std::int64_t kHeadWidth = 64;
constexpr std::int64_t kLayers = 6;  // whose parameters, gradients and activations no cache holds
/// The most that weights take of a product of few rows; what seems to be more is another program's
/// doing.
constexpr double kWeightsShareMax = 0.75;
// Twice as a bf16 number, or four times as an fp32 number: 0.0115, whose products are neither
// denormal nor large.
constexpr int kByte = 0x3c;

/// How long something took that was done often.
struct Took {
  double median_s = 0;
  double fastest_s = 0;
};

/// Returns how long each of `works` takes, which are done in turns for `seconds`: what else the
/// machine does, they have alike.
template <std::size_t kCount>
std::array<Took, kCount> took_of(double seconds,
                                 const std::array<std::function<void()>, kCount>& works) {
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point begun) {
    return std::chrono::duration<double>(Clock::now() - begun).count();
  };
  for (const auto& work : works) work();  // brings code and pages
  std::array<std::vector<double>, kCount> took;
  const Clock::time_point begun = Clock::now();
  while (took[0].size() < kTimesMin || since(begun) < seconds) {
    for (std::size_t i = 0; i < kCount; ++i) {
      const Clock::time_point before = Clock::now();
      works[i]();
      took[i].push_back(std::max(1e-9, since(before)));
    }
  }
  std::array<Took, kCount> all{};
  for (std::size_t i = 0; i < kCount; ++i) {
    std::ranges::sort(took[i]);
    all[i] = {.median_s = took[i][took[i].size() / 2], .fastest_s = took[i].front()};
  }
  return all;
}
/// Returns the median.
double seconds_of(double seconds, const std::function<void()>& work) {
  return took_of<1>(seconds, {work})[0].median_s;
}

/// Operands of a product, and what each worker needs beside them.
class Product {
 public:
  Product(std::int64_t rows, std::int64_t depth, std::int64_t columns, DType dtype,
          WorkerPool& workers)
      : shape_{.m = rows,
               .k = depth,
               .n = columns,
               .a = {depth, false},
               .b = {columns, false},
               .leading_c = columns,
               .dtype = dtype},
        workers_(workers),
        product_(shape_, workers.threads()),
        a_(bytes_of(rows * depth), std::byte{kByte}),
        b_(bytes_of(depth * columns), std::byte{kByte}) {
    const WideElements wide = wide_elements_tiled(shape_);
    const auto each = static_cast<std::size_t>(TiledMatmul::tile_elements_max());
    for (std::size_t i = 0; i < workers.threads(); ++i) {
      scratch_.push_back({std::vector<float>(each),
                          std::vector<float>(static_cast<std::size_t>(wide.a)),
                          std::vector<float>(static_cast<std::size_t>(wide.b))});
    }
  }

  std::size_t tile_count() const noexcept { return product_.tile_count(); }
  /// Returns a function that computes it.
  std::function<void()> work() {
    return [this] { run(); };
  }

 private:
  struct Scratch {
    std::vector<float> tile, a, b;
  };
  std::size_t bytes_of(std::int64_t elements) const {
    return static_cast<std::size_t>(elements) * size_bytes(shape_.dtype);
  }

  void run() {
    workers_.run_team([&](Team& team) {
      team.for_each(product_.tile_count(), [&](std::size_t i) {
        Scratch& own = scratch_[team.index()];
        product_.compute(i, team.index(), ConstArray(shape_.dtype, a_.data()),
                         ConstArray(shape_.dtype, b_.data()), own.tile.data(), {own.a, own.b});
      });
    });
  }

  MatmulShape shape_;
  WorkerPool& workers_;
  TiledMatmul product_;
  std::vector<std::byte> a_, b_;
  std::vector<Scratch> scratch_;
};

/// Layers of one sequence, as the trainer computes them.
class Layers {
 public:
  Layers(const ModelConfig& model, std::int64_t context, WorkerPool& workers)
      : model_(model),
        shape_{.batch = 1, .context = context},
        workers_(workers),
        attention_(model, context, workers.threads()),
        block_(model, {1, context}, workers.threads()),
        memory_({.owner = "the layers", .size_bytes = carve(nullptr)}) {
    std::memset(memory_.bytes().data(), kByte, memory_.bytes().size());
    carve(memory_.bytes().data());
  }

  /// Returns the operations a second of attention, of 1e9: forward has two products, and backward
  /// five, of the scores up to the end of a query's block.
  double measure_attention(double seconds) {
    const auto context = static_cast<double>(shape_.context);
    const double scores = context * (context + kAttentionBlock) / 2;
    const double operations = 7 * 2 * scores * static_cast<double>(model_.width);
    return operations / 1e9 / seconds_of(seconds, [&] {
             workers_.run_team([&](Team& team) {
               const BlockActivations& its = space_.activations[0][0];
               each_head(team, [&](const HeadView& head, std::int64_t at) {
                 attention_.forward(team.index(), head, its.attention + at, own(team));
               });
               each_head(team, [&](const HeadView& head, std::int64_t at) {
                 attention_.backward(team.index(), head, its.attention + at, space_.d_rows + at,
                                     own(team));
               });
             });
           });
  }

  /// Returns the seconds of a layer's forward and backward. They come one after the other, as in a
  /// step, so that none is in the caches still.
  double measure(double seconds) {
    const auto layers = static_cast<std::size_t>(model_.layers);
    const double all_s = seconds_of(seconds, [&] {
      workers_.run_team([&](Team& team) {
        for (std::size_t i = 0; i < layers; ++i) forward(team, i);
        for (std::size_t i = layers; i-- > 0;) backward(team, i);
      });
    });
    return all_s / static_cast<double>(layers);
  }

 private:
  void forward(Team& team, std::size_t layer) {
    block_.forward(team, space_.scratch,
                   {.params = params_ + offset(layer),
                    .x = space_.stream[layer][0],
                    .activations = space_.activations[layer][0],
                    .keep = Block::Keep::kAll,
                    .y = space_.stream[layer + 1][0]});
  }
  void backward(Team& team, std::size_t layer) {
    const Array gradient = space_.stream.back()[0];
    block_.backward(team, space_.scratch,
                    {.params = params_ + offset(layer),
                     .x = space_.stream[layer][0],
                     .activations = space_.activations[layer][0],
                     .gradient = gradient,
                     .all_gradient = gradient,
                     .d_rows = space_.d_rows,
                     .d_params = d_params_ + offset(layer)});
  }

  std::uint64_t carve(std::byte* base) {
    Carver carver(base);
    space_ = TrainerSpace::carve(model_, shape_, workers_.threads(), carver);
    params_ = carver.take(model_.dtype, model_.layers * params_count());
    d_params_ = carver.take<float>(model_.layers * params_count());
    return carver.used_bytes();
  }
  std::int64_t offset(std::size_t layer) const {
    return static_cast<std::int64_t>(layer) * params_count();
  }
  std::int64_t params_count() const {
    return static_cast<std::int64_t>(make_spec(model_).units[block_unit(0)].count());
  }
  const WorkerScratch& own(const Team& team) const { return space_.scratch[team.index()]; }

  template <class Work>
  void each_head(Team& team, const Work& work) {
    const BlockActivations& its = space_.activations[0][0];
    team.for_each(static_cast<std::size_t>(model_.heads), [&](std::size_t i) {
      const auto head = static_cast<std::int64_t>(i);
      const std::int64_t at = head * model_.head_width();
      work({.queries = its.qkv + at,
            .keys = its.qkv + (at + model_.width),
            .values = its.qkv + (at + 2 * model_.width),
            .stats = its.softmax_stats + head * shape_.context},
           at);
    });
  }

  ModelConfig model_;
  RunShape shape_;
  WorkerPool& workers_;
  Attention attention_;
  Block block_;
  TrainerSpace space_;
  Array params_;
  float* d_params_ = nullptr;
  HostMapping memory_;
};

/// Returns how fast the rest of a layer goes that took `seconds`, forward and backward together, of
/// which planning counts products and attention at the rates that were found.
double kernels_gb_per_s(const ComputeProfile& found, const ModelConfig& model, std::int64_t context,
                        double seconds) {
  MachineProfile profile;
  profile.compute = found;
  Machine machine = machine_of_profile(profile, {});
  machine.kernel_bandwidth = std::numeric_limits<double>::infinity();
  machine.attention_block = kAttentionBlock;
  Training training;
  training.model = ModelShape::gpt(1, model.width, model.heads, model.vocabulary, context);
  training.sequence = context;
  const LayerTime time = layer_time(training, machine, false);
  const double gigabytes = static_cast<double>(context) * kernel_bytes(training.model) / 1e9;
  const double least_s = gigabytes / found.pass_gb_per_s;  // memory is not faster
  return gigabytes / std::max(seconds - time.forward - time.backward, least_s);
}

}  // namespace

double weights_seconds(const TimedProduct& few, const TimedProduct& many) {
  const auto few_rows = static_cast<double>(few.rows), many_rows = static_cast<double>(many.rows);
  const double in_both = (many_rows * few.took_s - few_rows * many.took_s) / (many_rows - few_rows);
  return std::clamp(in_both, 0.0, kWeightsShareMax * std::min(few.took_s, many.took_s));
}

ComputeProfile measure_cores(WorkerPool& workers, double seconds) {
  ComputeProfile found;
  found.threads = workers.threads();
  constexpr std::int64_t kRows = 512;  // tokens
  constexpr std::int64_t kFewRows = 128;
  constexpr std::int64_t kColumns = 4 * kHidden;
  const auto product = [&](std::int64_t rows, std::int64_t columns, DType dtype) {
    return Product(rows, kHidden, columns, dtype, workers);
  };
  Product many = product(kRows, kColumns, DType::kBFloat16);
  Product few = product(kFewRows, kColumns, DType::kBFloat16);
  Product unaligned = product(kRows, kColumns + 1, DType::kBFloat16);
  Product wide = product(kRows, kColumns, DType::kFloat32);
  const auto [of_many, of_few] = took_of<2>(2 * seconds, {many.work(), few.work()});
  // Where rows are cut, many are on more cores than few, and each tile has weights of its own. The
  // fastest of each are compared: a difference of medians is mostly what else the machine did.
  const bool alike = many.tile_count() == few.tile_count();
  const double weights_share = alike
                                   ? weights_seconds({.rows = kFewRows, .took_s = of_few.fastest_s},
                                                     {.rows = kRows, .took_s = of_many.fastest_s}) /
                                         of_many.fastest_s
                                   : 0;
  const double weights_s = weights_share * of_many.median_s;
  const auto rate = [&](double took_s, std::int64_t columns) {
    const double rows_s = std::max(took_s - weights_s, took_s * (1 - kWeightsShareMax));
    return 2e-9 * kRows * kHidden * static_cast<double>(columns) / rows_s;
  };
  found.layer_gflop_per_s = rate(of_many.median_s, kColumns);
  found.layer_fp32_gflop_per_s = rate(seconds_of(seconds, wide.work()), kColumns);
  found.unaligned_gflop_per_s = rate(seconds_of(seconds, unaligned.work()), kColumns + 1);
  if (weights_s > 0) found.weights_gb_per_s = 2e-9 * kHidden * kColumns / weights_s;

  HostMapping memory({.owner = "the copies", .size_bytes = 2 * kPassBytes});
  std::byte* const from = memory.bytes().data();
  std::byte* const to = from + kPassBytes;
  std::memset(from, kByte, 2 * kPassBytes);
  found.pass_gb_per_s =
      2 * static_cast<double>(kPassBytes) / 1e9 / seconds_of(seconds, [&] {
        workers.for_each(kPassBytes / kPassPieceBytes, [&](std::size_t i) {
          std::memcpy(to + i * kPassPieceBytes, from + i * kPassPieceBytes, kPassPieceBytes);
        });
      });
  found.copy_gb_per_s = static_cast<double>(kPassBytes) / 1e9 /
                        seconds_of(seconds, [&] { std::memcpy(to, from, kPassBytes); });
  const ModelConfig model{
      .layers = kLayers, .width = kHidden / 2, .heads = kHidden / 2 / kHeadWidth, .part = {}};
  Layers layers(model, kRows, workers);
  found.attention_gflop_per_s = layers.measure_attention(seconds);
  found.kernels_gb_per_s = kernels_gb_per_s(found, model, kRows, layers.measure(seconds));
  found.measured_at = fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
  return found;
}

}  // namespace ziggurat::gpt
