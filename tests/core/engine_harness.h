// SPDX-License-Identifier: Apache-2.0
// tests/core/engine_harness.h: a small model, a trainer whose gradients depend on every parameter's
// bits, and the same training in plain arrays, to compare an engine of any placement with.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "collectives/quantize/quantize.h"
#include "core/engine/engine.h"
#include "core/engine/state/store_rounding.h"
#include "core/sharding/chunk_table.h"
#include "optimizer/gradient.h"
#include "optimizer/update.h"
#include "tests/support/scratch_directory.h"
#include "tests/support/typed_values.h"
#include "tiers/device/host_device.h"
#include "tiers/store/record_hash.h"

namespace ziggurat::testing {

/// Five units of uneven size: less than a tile, exactly one, a bit more, several chunks.
inline ModelSpec small_model() {
  ModelSpec model{.name = "small", .units = {}};
  const std::vector<std::int64_t> widths{90, 128, 129, 300, 400};
  for (std::size_t u = 0; u < widths.size(); ++u) {
    const std::string unit = "unit" + std::to_string(u);
    model.units.push_back(
        {.name = unit,
         .params = {{.name = unit + ".weight", .shape = {widths[u], 128}, .decay = true},
                    {.name = unit + ".bias", .shape = {widths[u]}, .decay = false}}});
  }
  return model;
}

/// The same, and each unit has a type of its own.
inline ModelSpec mixed_model() {
  ModelSpec model = small_model();
  model.units[1].dtype = DType::kFloat32;
  model.units[2].dtype = DType::kFloat16;
  model.units[3].dtype = DType::kFloat32;
  model.units[4].dtype = DType::kBFloat16;
  return model;
}

inline float initial_value(UnitId unit, std::uint64_t element) {
  const std::uint64_t mixed = (element * 2654435761U + unit * 40503U) % 20011U;
  return (static_cast<float>(mixed) - 10005.0F) / 20011.0F;
}

inline void initialize(UnitId unit, std::uint64_t first, std::span<float> values) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = initial_value(unit, first + i);
}

/// A gradient that any wrong parameter bit changes; another one on every rank, and of another size.
inline float gradient_of(float param, UnitId unit, std::uint64_t element, std::uint64_t step,
                         int rank = 0) {
  const auto r = static_cast<std::uint64_t>(rank);
  const float noise =
      static_cast<float>((element * (31 + 2 * r) + step * 7 + unit * 3) % 17) / 170.0F - 0.05F;
  return (0.01F * param + noise) * static_cast<float>(1 + 3 * rank);
}

/// Forward over all units, backward in reverse down to `last_unit`: a step but for its end.
inline void pass_step(Engine& engine, const ModelSpec& model, std::uint64_t step,
                      float learning_rate, float loudness = 1.0F, UnitId last_unit = 0,
                      int rank = 0) {
  engine.prepare_step({.learning_rate = learning_rate, .blob = {}});
  const auto units = static_cast<UnitId>(model.units.size());
  for (UnitId u = 0; u < units; ++u) {
    engine.acquire(u);
    engine.release(u);
  }
  for (UnitId u = units; u-- > last_unit;) {
    const auto params = HostDevice::view(engine.acquire(u));
    const auto gradient = HostDevice::view(engine.gradient(u));
    for (std::size_t i = 0; i < params.count(); ++i)
      gradient[i] += loudness * gradient_of(value_at(params, i), u, i, step, rank);
    engine.release(u);
    engine.finish_gradient(u);
  }
}

/// One step as a trainer does it. `loudness` multiplies its gradient.
inline StepResult train_step(Engine& engine, const ModelSpec& model, std::uint64_t step,
                             float learning_rate, std::span<const std::byte> blob = {},
                             float loudness = 1.0F, int rank = 0) {
  pass_step(engine, model, step, learning_rate, loudness, 0, rank);
  return engine.step({.learning_rate = learning_rate, .blob = blob});
}

/// A step of `passes` equal micro-batches, each through the whole model; gradients are finished in
/// the last.
inline StepResult train_passes(Engine& engine, const ModelSpec& model, std::uint64_t step,
                               int passes, int rank = 0) {
  engine.prepare_step({.learning_rate = 0.01F, .blob = {}});
  const auto units = static_cast<UnitId>(model.units.size());
  for (int pass = 0; pass < passes; ++pass) {
    for (UnitId u = 0; u < units; ++u) {
      engine.acquire(u);
      engine.release(u);
    }
    for (UnitId u = units; u-- > 0;) {
      const auto params = HostDevice::view(engine.acquire(u));
      const auto gradient = HostDevice::view(engine.gradient(u));
      for (std::size_t i = 0; i < params.count(); ++i)
        gradient[i] += gradient_of(value_at(params, i), u, i, step, rank);
      engine.release(u);
      if (pass == passes - 1) engine.finish_gradient(u);
    }
  }
  return engine.step({.learning_rate = 0.01F, .blob = {}});
}

inline constexpr std::uint64_t kRoundingSeed = 5;

/// The same model, of which nothing is stored without optimizer state.
inline ModelSpec without_constants(ModelSpec model) {
  for (UnitSpec& unit : model.units) {
    for (ParamSpec& param : unit.params) param.constant = false;
  }
  return model;
}

/// The same in plain arrays: what every placement must equal, bit for bit.
class PlainTraining {
 public:
  /// `rounding`: of all that is rounded; not given: as the engine does by itself.
  explicit PlainTraining(const ModelSpec& model, float clip_norm, StateKind state = {},
                         std::optional<Rounding> rounding = {}, float initial_accumulator = 0)
      : optimizer_{.state = state, .state_rounding = rounding, .param_rounding = rounding},
        table_(without_constants(model), 1U << 20, state, {}, rounding_of_new_store(optimizer_)),
        clip_norm_(clip_norm) {
    for (UnitId u = 0; u < table_.unit_count(); ++u) {
      std::vector<float> masters(table_.unit(u).padded_count);
      initialize(u, 0, std::span(masters).first(table_.unit(u).count));
      records_.emplace_back(table_.record_format().record_bytes(masters.size() / kTileElements));
      write_record(state.optimizer, state.format, masters, records_.back(), initial_accumulator);
      params_.emplace_back(masters.size() * table_.element_bytes(u));
      round_params(masters, all_params(u));
      seen_.push_back(params_.back());
    }
  }

  float loss_scale = 1;
  int world_size = 1;                 ///< ranks whose gradients are averaged
  int shard_group = 0;                ///< ranks summed by themselves first; 0: all of them
  std::optional<DType> reduce_dtype;  ///< of each one's and their sum, where there are several
  Quantization quantization;          ///< of what they send each other
  int ranks_per_node = 1;             ///< by which quantized gradients go

  /// For other settings than the engine's defaults.
  std::function<StepScalars(OptimizerStep::Settings)> make_scalars =
      [](const OptimizerStep::Settings& settings) {
        return StepScalars{OptimizerStep::make(settings)};
      };

  /// What the next steps are told of a store that does not name its rounding.
  void round_parameters(Rounding rounding) { optimizer_.param_rounding = rounding; }

  /// `step` is what gradients are made from; AdamW's own count is of the calls.
  double step(std::uint64_t step, float learning_rate, float loudness = 1.0F) {
    std::vector<std::vector<std::byte>> gradients;
    double sum = 0;
    for (UnitId u = 0; u < table_.unit_count(); ++u) {
      see_params(u);
      std::vector<float> accumulator = sum_over_ranks(u, step, loudness);
      clear_frozen(u, accumulator);
      gradients.emplace_back(params_[u].size());
      const TypedSpan<std::byte> rounded{table_.dtype(u), gradients.back()};
      for (std::size_t begin = 0; begin < accumulator.size(); begin += kTileElements) {
        sum += round_gradient(std::span(accumulator).subspan(begin, kTileElements),
                              rounded.subspan(begin, kTileElements));
      }
    }
    const double divisor = static_cast<double>(loss_scale) * world_size;
    const double norm = std::sqrt(sum) / divisor;
    const float coefficient = clip_coefficient(norm, clip_norm_);
    const StepScalars scalars =
        make_scalars({.kind = table_.state().optimizer,
                      .rounding = rounding_of_store(optimizer_, table_.rounding()),
                      .learning_rate = learning_rate,
                      .beta1 = 0.9F,
                      .beta2 = 0.95F,
                      .eps = 1e-8F,
                      .weight_decay = 0.1F,
                      .grad_scale = static_cast<float>(static_cast<double>(coefficient) / divisor),
                      .t = ++steps_,
                      .seed = kRoundingSeed});
    for (UnitId u = 0; u < table_.unit_count(); ++u) {
      const RecordView view{.format = table_.state().format,
                            .record = records_[u],
                            .grad = {table_.dtype(u), gradients[u]},
                            .param = all_params(u),
                            .first_element = table_.first_element(table_.unit(u).first_chunk)};
      update_record(scalars, view, table_.decay_runs(table_.unit(u).first_chunk));
      see_params(u);
    }
    return norm;
  }

  /// What a trainer computes with.
  TypedSpan<const std::byte> params(UnitId unit) const {
    const TypedSpan<const std::byte> all{table_.dtype(unit), seen_[unit]};
    return all.subspan(0, table_.unit(unit).count);
  }
  std::vector<float> master(UnitId unit) const {
    std::vector<float> masters(table_.unit(unit).padded_count);
    read_masters(table_.state().format, records_[unit], masters);
    masters.resize(table_.unit(unit).count);
    return masters;
  }

 private:
  void clear_frozen(UnitId unit, std::span<float> gradient) const {
    std::size_t begin = 0;
    for (const ParamSpec& param : table_.model().units[unit].params) {
      if (param.frozen) std::ranges::fill(gradient.subspan(begin, param.count()), 0.0F);
      begin += param.count();
    }
  }
  TypedSpan<std::byte> all_params(UnitId unit) { return {table_.dtype(unit), params_[unit]}; }

  /// The parameters, or what their 8-bit codes stand for.
  void see_params(UnitId unit) {
    seen_[unit] = params_[unit];
    if (!quantization.weights) return;
    const TypedSpan<std::byte> values{table_.dtype(unit), seen_[unit]};
    std::vector<std::byte> codes(quantized_bytes(QuantizedBits::k8, values.count()));
    quantize(QuantizedBits::k8, values, codes);
    dequantize(QuantizedBits::k8, codes, values);
  }

  /// What this rank adds to its accumulator, which begins with zeros.
  std::vector<float> gradients_of(int rank, UnitId unit, std::uint64_t step, float loudness) const {
    const TypedSpan<const std::byte> all{table_.dtype(unit), seen_[unit]};
    std::vector<float> accumulator(all.count(), 0.0F);
    for (std::size_t i = 0; i < table_.unit(unit).count; ++i)
      accumulator[i] += loss_scale * loudness * gradient_of(value_at(all, i), unit, i, step, rank);
    return accumulator;
  }

  /// Sums of a node's ranks of what their codes stand for, and then of the nodes' of what theirs
  /// do: in order, in fp32.
  std::vector<float> quantized_sum(UnitId unit, std::uint64_t step, float loudness) const {
    const auto bits = static_cast<QuantizedBits>(quantization.gradient_bits);
    const auto add = [&](std::vector<float>& sum, const std::vector<float>& values) {
      std::vector<std::byte> codes(quantized_bytes(bits, values.size()));
      quantize(bits, as_typed(std::span(values)), codes);
      add_dequantized(bits, codes, sum);
    };
    const std::size_t count = table_.unit(unit).padded_count;
    std::vector<float> sum(count, 0.0F);
    for (int first = 0; first < world_size; first += ranks_per_node) {
      std::vector<float> of_node(count, 0.0F);
      for (int rank = first; rank < first + ranks_per_node; ++rank)
        add(of_node, gradients_of(rank, unit, step, loudness));
      if (ranks_per_node == world_size) return of_node;
      if (ranks_per_node == 1)
        add(sum, gradients_of(first, unit, step, loudness));
      else
        add(sum, of_node);
    }
    return sum;
  }

  /// Each rank's own is rounded once to what travels; they add in rank order in fp32, rounded once.
  std::vector<float> sum_over_ranks(UnitId unit, std::uint64_t step, float loudness) const {
    if (quantization.gradients()) return quantized_sum(unit, step, loudness);
    const DType travels = reduce_dtype.value_or(table_.dtype(unit));
    const int group = shard_group == 0 ? world_size : shard_group;
    std::vector<float> total;
    std::vector<float> sum(table_.unit(unit).padded_count, 0.0F);
    for (int rank = 0; rank < world_size; ++rank) {
      const std::vector<float> accumulator = gradients_of(rank, unit, step, loudness);
      if (world_size == 1) return accumulator;
      const std::vector<float> sent = rounded_to(travels, accumulator);
      const bool first = rank % group == 0;
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = first ? sent[i] : sum[i] + sent[i];
      if (rank % group != group - 1) continue;
      const std::vector<float> of_group = rounded_to(travels, sum);
      if (total.empty()) {
        total = of_group;
      } else {
        for (std::size_t i = 0; i < sum.size(); ++i) total[i] += of_group[i];
      }
    }
    return rounded_to(travels, total);
  }

  static std::vector<float> rounded_to(DType dtype, const std::vector<float>& values) {
    std::vector<std::byte> bytes(values.size() * size_bytes(dtype));
    const TypedSpan<std::byte> rounded{dtype, bytes};
    round_gradient(values, rounded);
    std::vector<float> widened(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) widened[i] = value_at(rounded, i);
    return widened;
  }

  OptimizerConfig optimizer_;
  ChunkTable table_;
  float clip_norm_;
  std::uint64_t steps_ = 0;
  std::vector<std::vector<std::byte>> records_;
  std::vector<std::vector<std::byte>> params_;
  std::vector<std::vector<std::byte>> seen_;
};

inline EngineConfig small_config(const std::string& directory) {
  EngineConfig config;
  config.store = {{directory}};
  config.host_budget_bytes = 8 * kMiB;
  config.run_identity = "data=1 seed=2";
  config.numerics_fingerprint = "test";
  config.optimizer.rounding_seed = kRoundingSeed;
  return config;
}

/// The masters of a unit that one rank updates, from all its chunks, which follow each other.
inline std::vector<float> master_of(Engine& engine, UnitId unit) {
  std::vector<float> all;
  for (std::size_t chunk = 0; chunk < engine.master_chunks(unit); ++chunk) {
    const MasterChunk its = engine.read_master(unit, chunk);
    EXPECT_TRUE(its.first == all.size() || its.values.empty()) << "unit " << unit;
    all.insert(all.end(), its.values.begin(), its.values.end());
  }
  return all;
}

/// A runtime, a device and an engine over them, in the right order of destruction.
struct Rig {
  Rig(const ModelSpec& model, const EngineConfig& config, std::size_t threads = 2,
      std::uint64_t device_bytes = 4 * kMiB)
      : runtime(Runtime::create({.threads = threads, .trace_path = ""})),
        device(HostDevice::create(runtime->reactor, device_bytes, runtime->trace.get(),
                                  &runtime->metrics)),
        engine(Engine::open(model, config, *runtime, *device, initialize)) {}

  std::unique_ptr<Runtime> runtime;
  std::unique_ptr<Device> device;
  std::unique_ptr<Engine> engine;
};

/// Bits of all parameters of `engine` equal `plain`'s.
inline bool same_params(Engine& engine, const PlainTraining& plain, const ModelSpec& model) {
  bool same = true;
  for (UnitId u = 0; u < model.units.size(); ++u) {
    const auto got = HostDevice::view(engine.acquire(u));
    const auto expected = plain.params(u);
    same = same && got.dtype == expected.dtype && std::ranges::equal(got.bytes, expected.bytes);
    engine.release(u);
  }
  return same;
}

}  // namespace ziggurat::testing
