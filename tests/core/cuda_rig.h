// SPDX-License-Identifier: Apache-2.0
// tests/core/cuda_rig.h: an engine on a GPU, which is the double of the CUDA runtime, with its
// trainer; and what they train with.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/core/gpu_harness.h"
#include "tests/cuda_double/cuda_double.h"
#include "tiers/device/cuda_device.h"

namespace ziggurat::testing {

/// What a run on the GPU trains with.
struct GpuSettings {
  std::string name;
  std::string placement;
  float clip_norm = 1.0F;
  EngineConfig::Speculation speculation = EngineConfig::Speculation::kAuto;
  int passes = 1;  ///< equal micro-batches of a step
  std::optional<float> loss_scale = std::nullopt;

  EngineConfig config(const std::string& directory) const {
    EngineConfig config = small_config(directory);
    config.placement = parse_placement(placement);
    config.clip_norm = clip_norm;
    config.speculation = speculation;
    return config;
  }
  StepOptions options() const {
    return {.learning_rate = 0.01F, .loss_scale = loss_scale, .blob = {}};
  }
};

inline void PrintTo(const GpuSettings& settings, std::ostream* out) { *out << settings.name; }

/// train_passes() with the GPU's memory.
inline StepResult train_on(Gpu& gpu, Engine& engine, const ModelSpec& model, std::uint64_t step,
                           const GpuSettings& settings) {
  engine.prepare_step(settings.options());
  const float scale = settings.loss_scale.value_or(1.0F);
  for (int pass = 0; pass < settings.passes; ++pass)
    pass_on(gpu, engine, model, step, 0, scale, pass == settings.passes - 1);
  return engine.step(settings.options());
}

/// The same training in plain arrays: its state at each generation, and the norms.
struct PlainRun {
  PlainRun(const ModelSpec& model, const GpuSettings& settings, std::uint64_t steps) {
    PlainTraining plain(model, settings.clip_norm);
    plain.loss_scale = settings.loss_scale.value_or(1.0F);
    at.push_back(plain);
    for (std::uint64_t step = 0; step < steps; ++step) {
      // Equal micro-batches are one of so many times the gradient, exactly, for powers of two.
      norms.push_back(
          plain.step(step, settings.options().learning_rate, static_cast<float>(settings.passes)));
      at.push_back(plain);
    }
  }
  std::vector<PlainTraining> at;
  std::vector<double> norms;
};

/// A runtime, a GPU and an engine over them, on the double as it stands: reset() comes before.
struct GpuRig {
  GpuRig(const ModelSpec& model, const EngineConfig& config,
         const RuntimeOptions& options = small())
      : runtime(Runtime::create(options)),
        device(CudaDevice::create(runtime->reactor, {.capacity_bytes = 6 * kMiB,
                                                     .trace = runtime->trace.get(),
                                                     .metrics = &runtime->metrics})),
        gpu(std::make_unique<Gpu>(kMiB)),
        engine(Engine::open(model, config, *runtime, *device, initialize)) {}
  static RuntimeOptions small() { return {.threads = 2, .trace_path = ""}; }

  /// Closes, and says what was done against the documentation or left behind.
  std::vector<std::string> close() {
    engine.reset();
    gpu.reset();
    device.reset();
    runtime.reset();
    return cuda_double::report();
  }

  std::unique_ptr<Runtime> runtime;
  std::unique_ptr<CudaDevice> device;
  std::unique_ptr<Gpu> gpu;
  std::unique_ptr<Engine> engine;
};

inline bool same_params(GpuRig& rig, const PlainTraining& plain, const ModelSpec& model) {
  return same_params(*rig.gpu, *rig.engine, plain, model);
}

}  // namespace ziggurat::testing
