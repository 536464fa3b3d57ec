// SPDX-License-Identifier: Apache-2.0
// core/sharding/quantization.cc: what is refused, and why.
#include "core/sharding/quantization.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"

namespace ziggurat {
namespace {

/// The flags that ask for it.
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
    refuse(fmt::format("`quantized_gradients={}`: give 4 or 8, or 16 for none", bits));
  if (!quantization.any()) return;
  if (strategy.dp == 1)
    refuse(flags(quantization) + " with one rank: there is nobody to send anything to");
  if (strategy.zero_stage != 3 || strategy.is_hybrid()) {
    refuse(fmt::format("{} with {}: for stage 3 over all ranks only", flags(quantization),
                       to_string(strategy)));
  }
  if (dp_ranks_per_node < 1) {
    refuse(fmt::format("{}: {} ranks on a node: give 1 or more", flags(quantization),
                       dp_ranks_per_node));
  }
  const int within = std::min(strategy.dp, dp_ranks_per_node);
  if (strategy.dp % within != 0) {
    refuse(
        fmt::format("{} go node by node: {} ranks are not whole nodes of {}; "
                    "`ranks_per_node` says how many a node has",
                    flags(quantization), strategy.dp, within));
  }
}

}  // namespace ziggurat
