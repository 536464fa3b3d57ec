// SPDX-License-Identifier: Apache-2.0
// tests/integrations/gpt_reference.h: GPT-2's loss in double precision, written from the formulas,
// one loop a line.
#pragma once

#include <cmath>
#include <span>
#include <vector>

#include "integrations/gpt/model.h"
#include "integrations/gpt/text.h"

namespace ziggurat::gpt {

/// Parameters as one vector a unit, in ModelSpec's order.
using ReferenceParams = std::vector<std::vector<double>>;

class ReferenceModel {
 public:
  explicit ReferenceModel(const ModelConfig& config)
      : config_(config), embedding_(config), block_(config) {}

  /// Mean loss over the batches' tokens.
  double loss(const ReferenceParams& params, std::span<const Batch> batches,
              std::int64_t context) const {
    double sum = 0;
    std::size_t tokens = 0;
    for (const Batch& batch : batches) {
      for (std::size_t first = 0; first < batch.inputs.size();
           first += static_cast<std::size_t>(context)) {
        sum += sequence(params,
                        std::span(batch.inputs).subspan(first, static_cast<std::size_t>(context)),
                        std::span(batch.targets).subspan(first, static_cast<std::size_t>(context)));
        tokens += static_cast<std::size_t>(context);
      }
    }
    return sum / static_cast<double>(tokens);
  }

 private:
  using Matrix = std::vector<std::vector<double>>;  // [position][column]

  static Matrix linear(const Matrix& x, const double* weight, const double* bias, std::size_t out) {
    Matrix y(x.size(), std::vector<double>(out));
    for (std::size_t t = 0; t < x.size(); ++t) {
      for (std::size_t o = 0; o < out; ++o) y[t][o] = bias[o];
      for (std::size_t i = 0; i < x[t].size(); ++i) {
        for (std::size_t o = 0; o < out; ++o) y[t][o] += x[t][i] * weight[i * out + o];
      }
    }
    return y;
  }

  static Matrix norm(const Matrix& x, const double* weight, const double* bias) {
    Matrix y = x;
    for (std::vector<double>& row : y) {
      double mean = 0;
      double variance = 0;
      for (const double v : row) mean += v / static_cast<double>(row.size());
      for (const double v : row)
        variance += (v - mean) * (v - mean) / static_cast<double>(row.size());
      for (std::size_t i = 0; i < row.size(); ++i)
        row[i] = (row[i] - mean) / std::sqrt(variance + 1e-5) * weight[i] + bias[i];
    }
    return y;
  }

  static void add(Matrix& x, const Matrix& y) {
    for (std::size_t t = 0; t < x.size(); ++t) {
      for (std::size_t i = 0; i < x[t].size(); ++i) x[t][i] += y[t][i];
    }
  }

  Matrix attention(const Matrix& qkv) const {
    const auto width = static_cast<std::size_t>(config_.width);
    const auto d = static_cast<std::size_t>(config_.head_width());
    Matrix out(qkv.size(), std::vector<double>(width));
    for (std::size_t first = 0; first < width; first += d) {
      for (std::size_t t = 0; t < qkv.size(); ++t) {
        std::vector<double> p(t + 1);
        double total = 0;
        for (std::size_t s = 0; s <= t; ++s) {
          double dot = 0;
          for (std::size_t i = 0; i < d; ++i) dot += qkv[t][first + i] * qkv[s][width + first + i];
          total += p[s] = std::exp(dot / std::sqrt(static_cast<double>(d)));
        }
        for (std::size_t s = 0; s <= t; ++s) {
          for (std::size_t i = 0; i < d; ++i)
            out[t][first + i] += p[s] / total * qkv[s][2 * width + first + i];
        }
      }
    }
    return out;
  }

  double sequence(const ReferenceParams& params, std::span<const std::uint8_t> inputs,
                  std::span<const std::uint8_t> targets) const {
    const auto width = static_cast<std::size_t>(config_.width);
    const double* e = params[0].data();
    Matrix x(inputs.size(), std::vector<double>(width));
    for (std::size_t t = 0; t < inputs.size(); ++t) {
      for (std::size_t i = 0; i < width; ++i) {
        x[t][i] = e[static_cast<std::size_t>(embedding_.wte) + inputs[t] * width + i] +
                  e[static_cast<std::size_t>(embedding_.wpe) + t * width + i];
      }
    }
    for (std::size_t layer = 0; layer < static_cast<std::size_t>(config_.layers); ++layer) {
      const double* p = params[layer + 1].data();
      const Matrix qkv = linear(norm(x, p + block_.ln_1_weight, p + block_.ln_1_bias),
                                p + block_.qkv_weight, p + block_.qkv_bias, 3 * width);
      add(x, linear(attention(qkv), p + block_.attention_projection_weight,
                    p + block_.attention_projection_bias, width));
      Matrix h = linear(norm(x, p + block_.ln_2_weight, p + block_.ln_2_bias), p + block_.fc_weight,
                        p + block_.fc_bias, 4 * width);
      for (std::vector<double>& row : h) {
        for (double& v : row)
          v = 0.5 * v *
              (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (v + 0.044715 * v * v * v)));
      }
      add(x, linear(h, p + block_.mlp_projection_weight, p + block_.mlp_projection_bias, width));
    }
    x = norm(x, e + embedding_.ln_f_weight, e + embedding_.ln_f_bias);
    double sum = 0;
    for (std::size_t t = 0; t < inputs.size(); ++t) {
      double total = 0;
      double of_target = 0;
      for (std::size_t v = 0; v < static_cast<std::size_t>(config_.vocabulary); ++v) {
        double logit = 0;
        for (std::size_t i = 0; i < width; ++i)
          logit += x[t][i] * e[static_cast<std::size_t>(embedding_.wte) + v * width + i];
        total += std::exp(logit);
        if (v == targets[t]) of_target = logit;
      }
      sum += std::log(total) - of_target;
    }
    return sum;
  }

  ModelConfig config_;
  EmbeddingLayout embedding_;
  BlockLayout block_;
};

}  // namespace ziggurat::gpt
