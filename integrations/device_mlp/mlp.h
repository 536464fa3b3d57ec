// SPDX-License-Identifier: Apache-2.0
// integrations/device_mlp/mlp.h: the smallest trainer that computes where an engine's device is: a
// language model over bytes with one hidden layer, which guesses the byte behind a few others. An
// example of Engine's calls for authors of trainers, and the proof that a GPU and the emulated
// device train with the same bits; not for use.
//
// Units: 0 the embedding [256, width], 1 the hidden layer, 2 the head, each a weight and a bias.
// Activations and what layers hand back are memory of the trainer's own on the device.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/engine/engine.h"
#include "integrations/device_mlp/machine.h"

namespace ziggurat::device_mlp {

struct MlpShape {
  std::size_t rows = 8;     ///< of a step
  std::size_t context = 4;  ///< bytes that a guess is made from
  std::size_t width = 8;    ///< of a byte's embedding
  std::size_t hidden = 16;
};

inline constexpr std::size_t kClasses = 256;

ModelSpec mlp_model(const MlpShape& shape);
/// Values by element, the same on every machine. An Initializer of mlp_model().
void initialize_mlp(UnitId unit, std::uint64_t first, std::span<float> values);

class Mlp {
 public:
  /// All must outlive it; `device` is the engine's. Errors: kResourceExhausted.
  Mlp(Engine& engine, Device& device, Machine& machine, const MlpShape& shape);

  /// Device bytes that the constructor takes: EngineConfig::trainer_device_bytes.
  static std::uint64_t device_bytes(const MlpShape& shape);

  /// One step over rows of `text` that `step` chooses. Returns the mean cross-entropy before it.
  double step(std::span<const std::uint8_t> text, std::uint64_t step, float learning_rate);

 private:
  /// One buffer's parts.
  struct Space {
    DeviceSpan<std::byte> tokens, targets;
    DeviceSpan<float> x, h, logits, dh, dx, probabilities;
    std::uint64_t size_bytes = 0;
  };
  static Space cut(const MlpShape& shape, std::uintptr_t base);
  void load(std::span<const std::uint8_t> text, std::uint64_t step);
  void forward();
  void head();
  void backward();

  Engine& engine_;
  Machine& machine_;
  MlpShape shape_;
  DeviceBuffer memory_;
  Space space_;
};

}  // namespace ziggurat::device_mlp
