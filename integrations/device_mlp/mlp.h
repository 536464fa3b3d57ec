// SPDX-License-Identifier: Apache-2.0
// integrations/device_mlp/mlp.h: the smallest trainer that computes on an engine's device: a
// language model over bytes with one hidden layer, which guesses the byte that follows a few
// others. It shows authors of trainers the Engine's calls, and proves that a GPU and the emulated
// device train with the same bits. It is not for use.
//
// Unit 0 is the embedding [256, width], unit 1 the hidden layer and unit 2 the head; the last two
// have a weight and a bias each. The trainer has its own device memory for activations and for the
// gradients that layers hand back.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/engine/engine.h"
#include "integrations/device_mlp/machine.h"

namespace ziggurat::device_mlp {

struct MlpShape {
  std::size_t rows = 8;     ///< rows of a step
  std::size_t context = 4;  ///< bytes that a guess is made from
  std::size_t width = 8;    ///< width of a byte's embedding
  std::size_t hidden = 16;
};

inline constexpr std::size_t kClasses = 256;

ModelSpec mlp_model(const MlpShape& shape);
/// Fills in values by element, the same on every machine. An Initializer of mlp_model().
void initialize_mlp(UnitId unit, std::uint64_t first, std::span<float> values);

class Mlp {
 public:
  /// All arguments must outlive this object; `device` is the engine's. Errors: kResourceExhausted.
  Mlp(Engine& engine, Device& device, Machine& machine, const MlpShape& shape);

  /// Returns the device bytes that the constructor takes: EngineConfig::trainer_device_bytes.
  static std::uint64_t device_bytes(const MlpShape& shape);

  /// Makes one step over rows of `text` that `step` chooses. Returns the mean cross-entropy before
  /// the step.
  double step(std::span<const std::uint8_t> text, std::uint64_t step, float learning_rate);

 private:
  /// The parts of the one buffer.
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
