// SPDX-License-Identifier: Apache-2.0
// integrations/device_mlp/layers.h: the layers of a small language model as block programs
// (base/numerics/block_program.h). A thread computes one element, by a sum in a fixed order, so a
// GPU and the CPU give the same bits. The layers are not fast, because threads share no tile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/numerics/block_program.h"
#include "base/numerics/host_device.h"
#include "base/numerics/typed_value.h"

namespace ziggurat::device_mlp {

/// Runs `rule(i)` for each i below `count`.
template <class Rule>
struct Each {
  static constexpr std::uint32_t kThreads = 64;
  static constexpr int kPhases = 1;
  struct Shared {};

  Rule rule;
  std::uint64_t count;

  std::uint64_t blocks() const { return blocks_of(count, kThreads); }
  ZIGGURAT_HOST_DEVICE void run(Phase<0>, Shared&, Place at) const {
    const std::uint64_t i = at.block * kThreads + at.thread;
    if (i < count) rule(i);
  }
};

/// The parameters of a unit, on the device.
struct Params {
  DType dtype;
  const std::byte* values;
  ZIGGURAT_HOST_DEVICE float at(std::size_t i) const { return value_at(dtype, values, i); }
};

/// Computes x[row, e] = table[token of the row, e].
struct Embed {
  const std::uint8_t* tokens;
  Params table;
  std::size_t width;
  float* x;

  ZIGGURAT_HOST_DEVICE void operator()(std::size_t i) const {
    x[i] = table.at(tokens[i / width] * width + i % width);
  }
};

/// The shape of a layer's weight [outputs, inputs], which its bias [outputs] follows.
struct Shape {
  std::size_t inputs, outputs;
  ZIGGURAT_HOST_DEVICE std::size_t weights() const { return inputs * outputs; }
};

/// Computes y = x W^T + b, or the positive part of it.
struct Linear {
  Shape shape;
  Params params;
  const float* x;
  bool positive;
  float* y;

  ZIGGURAT_HOST_DEVICE void operator()(std::size_t i) const {
    const std::size_t row = i / shape.outputs;
    const std::size_t output = i % shape.outputs;
    float sum = params.at(shape.weights() + output);
    for (std::size_t k = 0; k < shape.inputs; ++k)
      sum = sum + x[row * shape.inputs + k] * params.at(output * shape.inputs + k);
    y[i] = positive && !(sum > 0.0F) ? 0.0F : sum;
  }
};

/// Returns e^x for x <= 0 with + and x alone: (1 + y + y^2/2)^1024 with y = x/1024, which is within
/// 1e-4 of it down to -30.
ZIGGURAT_HOST_DEVICE inline float exp_of(float x) {
  const float y = x * (1.0F / 1024.0F);
  float power = 1.0F + y + y * y * 0.5F;
  for (int i = 0; i < 10; ++i) power = power * power;
  return power;
}

/// Computes the target's probability in each row of logits, and replaces the logits by the gradient
/// of the mean cross-entropy. One thread per row.
struct Softmax {
  std::size_t classes;
  const std::uint8_t* targets;
  float scale;  ///< 1 / rows
  float* logits;
  float* probabilities;

  ZIGGURAT_HOST_DEVICE void operator()(std::size_t row) const {
    float* const z = logits + row * classes;
    float largest = z[0];
    for (std::size_t k = 1; k < classes; ++k) largest = z[k] > largest ? z[k] : largest;
    float sum = 0.0F;
    for (std::size_t k = 0; k < classes; ++k) {
      z[k] = exp_of(z[k] - largest);
      sum = sum + z[k];
    }
    probabilities[row] = z[targets[row]] / sum;
    for (std::size_t k = 0; k < classes; ++k) {
      const float p = z[k] / sum;
      z[k] = (k == targets[row] ? p - 1.0F : p) * scale;
    }
  }
};

/// Adds dy^T x to the gradient, and the sum of dy for the bias. One thread per parameter.
struct LinearGradient {
  Shape shape;
  const float* x;
  const float* dy;
  std::size_t rows;
  float* gradient;

  ZIGGURAT_HOST_DEVICE void operator()(std::size_t i) const {
    const bool bias = i >= shape.weights();
    const std::size_t output = bias ? i - shape.weights() : i / shape.inputs;
    float sum = 0.0F;
    for (std::size_t row = 0; row < rows; ++row) {
      const float value = bias ? 1.0F : x[row * shape.inputs + i % shape.inputs];
      sum = sum + dy[row * shape.outputs + output] * value;
    }
    gradient[i] = gradient[i] + sum;
  }
};

/// Computes dx = dy W; if `gated`, 0 where x was not positive.
struct LinearBackward {
  Shape shape;
  Params params;
  const float* dy;
  const float* x;
  bool gated;
  float* dx;

  ZIGGURAT_HOST_DEVICE void operator()(std::size_t i) const {
    const std::size_t row = i / shape.inputs;
    const std::size_t input = i % shape.inputs;
    float sum = 0.0F;
    for (std::size_t k = 0; k < shape.outputs; ++k)
      sum = sum + dy[row * shape.outputs + k] * params.at(k * shape.inputs + input);
    dx[i] = gated && !(x[i] > 0.0F) ? 0.0F : sum;
  }
};

/// Adds the sum over the token's rows to gradient[token, e]. One thread per parameter.
struct EmbedGradient {
  const std::uint8_t* tokens;
  const float* dx;
  std::size_t width, rows;
  float* gradient;

  ZIGGURAT_HOST_DEVICE void operator()(std::size_t i) const {
    float sum = 0.0F;
    for (std::size_t row = 0; row < rows; ++row) {
      if (tokens[row] == i / width) sum = sum + dx[row * width + i % width];
    }
    gradient[i] = gradient[i] + sum;
  }
};

}  // namespace ziggurat::device_mlp
