// SPDX-License-Identifier: Apache-2.0
// core/sharding/quantization.cc: which quantization is refused, and why.
#include "core/sharding/quantization.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"

namespace ziggurat {
namespace {

/// Names the settings that ask for quantization.
std::string flags(const Quantization& quantization) {
  std::string text = quantization.weights ? "`quantized_weights`" : "";
  if (quantization.gradients()) {
    text += fmt::format("{}`quantized_gradients={}`", text.empty() ? "" : " and ",
                        quantization.gradient_bits);
  }
  return text;
}

}  // namespace

void require_quantizable(const Quantization& quantization, const Strategy& strategy,
                         int dp_ranks_per_node) {
  const auto refuse = [](const std::string& message) {
    throw Error(ErrorCode::kInvalidArgument, message);
  };
  const int bits = quantization.gradient_bits;
  if (bits != 4 && bits != 8 && bits != 16)
    refuse(fmt::format(
        "`quantized_gradients={}` is not supported: give 4 or 8 bits, or 16 for no quantization",
        bits));
  if (!quantization.any()) return;
  if (strategy.dp == 1)
    refuse(flags(quantization) +
           " cannot be used with one rank, which sends nothing: leave it out, or start more ranks");
  if (strategy.zero_stage != 3 || strategy.is_hybrid()) {
    refuse(fmt::format("{} can be used only with `zero_stage=3` over all ranks; this run has {}",
                       flags(quantization), to_string(strategy)));
  }
  if (dp_ranks_per_node < 1) {
    refuse(
        fmt::format("{} cannot be used with {} ranks on a node: give 1 or more as `ranks_per_node`",
                    flags(quantization), dp_ranks_per_node));
  }
  const int within = std::min(strategy.dp, dp_ranks_per_node);
  if (strategy.dp % within != 0) {
    refuse(
        fmt::format("{} cannot be used, because {} ranks do not fill nodes of {}: set "
                    "`ranks_per_node` to a divisor of the number of ranks",
                    flags(quantization), strategy.dp, within));
  }
}

}  // namespace ziggurat
