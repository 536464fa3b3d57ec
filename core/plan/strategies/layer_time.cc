// SPDX-License-Identifier: Apache-2.0
// core/plan/strategies/layer_time.cc: a layer's products and passes over memory, from its shapes.
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "core/plan/strategies/step_time.h"

namespace ziggurat {
namespace {

/// The sides of a product: rows x columns, summed over depth.
struct Product {
  double rows, columns, depth;
};

/// Returns the share of the processors that whole waves of tiles keep busy.
double filled(double rows, double columns, double tile_rows, double tile_columns,
              double processors) {
  const double tiles = std::ceil(rows / tile_rows) * std::ceil(columns / tile_columns);
  return tiles / (std::ceil(tiles / processors) * processors);
}

double seconds_of(const Product& product, const Machine& machine) {
  constexpr double kSide = 128;
  constexpr double kLongSide = 256;
  constexpr double kSmallTileShare = 0.9;  // a square tile reads more for each product
  const double processors = machine.processors;
  const double waves =
      std::max({filled(product.rows, product.columns, kSide, kLongSide, processors),
                filled(product.rows, product.columns, kLongSide, kSide, processors),
                kSmallTileShare * filled(product.rows, product.columns, kSide, kSide, processors)});
  const double ragged = product.rows / (std::ceil(product.rows / kSide) * kSide) *
                        (product.columns / (std::ceil(product.columns / kSide) * kSide));
  const double operations = 2 * product.rows * product.columns * product.depth;
  const double bytes = 2 * (product.rows * product.depth + product.depth * product.columns +
                            product.rows * product.columns);
  constexpr double kProductStream = 0.8;  // products read memory better than passes do
  const double computing = operations / (machine.flops * machine.reach.product * waves * ragged);
  // Cores put weights in order before they multiply; what a row takes is in their operations.
  if (machine.weight_bandwidth > 0)
    return computing + 2 * product.depth * product.columns / machine.weight_bandwidth;
  return std::max(computing, bytes / (machine.device_bandwidth * kProductStream));
}

/// Returns the bytes a second of what is neither a product nor attention.
double kernel_bandwidth(const Machine& machine) {
  if (machine.kernel_bandwidth > 0) return machine.kernel_bandwidth;
  return machine.device_bandwidth * machine.reach.stream;
}

/// Returns the products of a layer's forward, on one rank.
std::vector<Product> products_of(const Training& training, bool experts) {
  const ModelShape& model = training.model;
  const double tp = training.layout.tp;
  const auto rows = static_cast<double>(training.tokens());
  const auto hidden = static_cast<double>(model.hidden);
  const auto attended = static_cast<double>(model.attended_width());
  const auto into =
      static_cast<double>(model.query_width() + model.key_width() + model.value_width());
  std::vector<Product> products{{rows, into / tp, hidden}, {rows, hidden, attended / tp}};
  const auto mlp = [&](double of, double ffn) {
    products.push_back({of, (model.gated ? 2 : 1) * ffn / tp, hidden});
    products.push_back({of, hidden, ffn / tp});
  };
  if (!experts) {
    mlp(rows, static_cast<double>(model.ffn));
  } else {
    // Balanced experts: the rows of all of them are those of the tokens, once for each choice.
    mlp(rows * static_cast<double>(model.experts.per_token),
        static_cast<double>(model.experts.ffn));
    if (model.experts.shared_ffn > 0) mlp(rows, static_cast<double>(model.experts.shared_ffn));
  }
  return products;
}

/// Bytes that passes over memory move, a token: of norms, dropouts and residuals, which tensor
/// ranks repeat, and of what they divide.
struct Passes {
  double whole, divided;
};

/// Counts reads and writes of 16-bit elements: norms read and write (4h; 8h in backward), a
/// residual with bias and dropout reads two and writes one and its mask (7h each), sums of
/// gradients (6h each); attention's parts are cut from and put into one tensor.
Passes forward_passes(const ModelShape& model, double ffn) {
  const auto hidden = static_cast<double>(model.hidden);
  return {22 * hidden, 4 * hidden + (model.gated ? 6 : 4) * ffn};
}
Passes backward_passes(const ModelShape& model, double ffn) {
  const auto hidden = static_cast<double>(model.hidden);
  return {42 * hidden, 22 * hidden + (model.gated ? 10 : 8) * ffn};
}

struct Attention {
  double forward, backward;
};

Attention attention_time(const Training& training, const Machine& machine) {
  const ModelShape& model = training.model;
  const auto sequence = static_cast<double>(training.sequence);
  const double depth = static_cast<double>(model.query_width()) / static_cast<double>(model.heads);
  const double scores = static_cast<double>(training.tokens()) * static_cast<double>(model.heads) *
                        sequence / training.layout.tp;
  const Reach& reach = machine.reach;
  if (training.software.flash) {
    // Causal: half of the scores; backward makes them again, and has five products of two.
    const double whole = std::min(machine.attention_block, sequence) / sequence;
    const double product = scores * (1 + whole) * depth / (machine.flops * reach.flash);
    return {2 * product, 5 * product};
  }
  const double product = std::max(2 * scores * depth / (machine.flops * reach.product),
                                  2 * scores / (machine.device_bandwidth * reach.stream));
  // Softmax reads and writes 2 bytes, dropout too, and a byte of mask; their backward 11 in all.
  const double pass = scores / (machine.device_bandwidth * reach.scores);
  return {2 * product + 9 * pass, 4 * product + 11 * pass};
}

}  // namespace

LayerTime layer_time(const Training& training, const Machine& machine, bool experts) {
  const ModelShape& model = training.model;
  const double tp = training.layout.tp;
  LayerTime time;
  double weights = 0;
  for (const Product& of : products_of(training, experts)) {
    time.forward += seconds_of(of, machine);
    time.backward += seconds_of({of.rows, of.depth, of.columns}, machine);
    if (training.lora.rank > 0) continue;  // a frozen weight has no gradient
    time.backward += seconds_of({of.columns, of.depth, of.rows}, machine);
    weights += of.columns * of.depth;
  }
  const Attention attention = attention_time(training, machine);
  time.forward += attention.forward;
  time.backward += attention.backward;
  const double ffn = static_cast<double>(
      experts ? model.experts.ffn * model.experts.per_token + model.experts.shared_ffn : model.ffn);
  const double memory = kernel_bandwidth(machine);
  const auto tokens = static_cast<double>(training.tokens());
  const Passes forward = forward_passes(model, ffn);
  const Passes backward = backward_passes(model, ffn);
  constexpr double kAddedGradient = 6;  // a weight's gradient is read twice and written
  constexpr double kNormsAgain = 8;     // two norms read and write 2 bytes each
  const auto hidden = static_cast<double>(model.hidden);
  time.forward += tokens * (forward.whole + forward.divided / tp) / memory;
  time.backward += tokens * (backward.whole + backward.divided / tp) / memory +
                   kAddedGradient * weights / (machine.device_bandwidth * machine.reach.stream);
  time.forward = std::max(time.forward, training.software.host_forward_layer_s);
  time.backward = std::max(time.backward, training.software.host_backward_layer_s);
  if (training.recompute == Recompute::kFull) {
    time.again = time.forward;
    if (training.software.leaves_out_last)
      time.again -= seconds_of(products_of(training, experts).back(), machine);
  }
  // Scores and their softmax are about a tenth of a layer.
  if (training.recompute == Recompute::kSelective)
    time.again = training.software.flash
                     ? tokens * (kNormsAgain * hidden + (model.gated ? 6 : 4) * ffn / tp) / memory
                     : 0.1 * time.forward;
  return time;
}

double kernel_bytes(const ModelShape& model) {
  const auto ffn = static_cast<double>(model.ffn);
  const Passes forward = forward_passes(model, ffn);
  const Passes backward = backward_passes(model, ffn);
  return forward.whole + forward.divided + backward.whole + backward.divided;
}

double head_time(const Training& training, const Machine& machine) {
  const ModelShape& model = training.model;
  // A vocabulary is cut evenly; a rest is another rank's.
  const double columns = std::floor(static_cast<double>(model.vocabulary) / training.layout.tp);
  const auto tokens = static_cast<double>(training.tokens());
  const double aligned = std::fmod(columns, 8) == 0 ? 1 : machine.reach.unaligned;
  constexpr double kPasses = 28;  // bytes of an entry: cast, log-softmax, and back
  return 3 * 2 * tokens * columns * static_cast<double>(model.hidden) /
             (machine.flops * machine.reach.product * aligned) +
         kPasses * tokens * columns / kernel_bandwidth(machine);
}

}  // namespace ziggurat
