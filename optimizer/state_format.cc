// SPDX-License-Identifier: Apache-2.0
// optimizer/state_format.cc: lists the segments of each format.
#include "optimizer/state_format.h"

#include <fmt/format.h>

#include <array>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "optimizer/eight_bit.h"
#include "optimizer/state_values.h"

namespace ziggurat {
namespace {

constexpr std::array<std::string_view, 5> kNames{"fp32", "bf16-moments", "8bit", "split", "bf16"};

/// As torch.optim calls them.
std::vector<std::string> moment_names(OptimizerKind kind) {
  std::vector<std::string> names = state_names(kind);
  names.erase(names.begin());  // the master
  return names;
}

struct Element {
  const char* type;
  std::uint32_t size_bytes;
};

Element stored_moment(StateFormat format) {
  switch (format) {
    case StateFormat::kBf16Moments:
    case StateFormat::kBf16: return {"bf16", 2};
    case StateFormat::k8Bit: return {"8-bit", 1};
    default: return {"fp32", 4};
  }
}

/// The largest initial accumulator. Its sums with squares are far from overflow, also in bf16.
constexpr float kAccumulatorMax = 1e30F;

}  // namespace

std::string_view to_string(StateFormat format) noexcept {
  return kNames[static_cast<std::size_t>(format)];
}

std::span<const std::string_view> state_format_names() noexcept { return kNames; }

std::optional<StateFormat> parse_state_format(std::string_view name) noexcept {
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) return static_cast<StateFormat>(i);
  }
  return std::nullopt;
}

std::vector<std::string> state_names(OptimizerKind kind) {
  switch (kind) {
    case OptimizerKind::kAdamW:
    case OptimizerKind::kAdam: return {"master", "exp_avg", "exp_avg_sq"};
    case OptimizerKind::kLion: return {"master", "exp_avg"};
    case OptimizerKind::kAdagrad: return {"master", "sum"};
    case OptimizerKind::kSgd: return {"master", "momentum_buffer"};
  }
  return {};
}

RecordFormat record_format(const StateKind& state) {
  const auto [kind, format, own_blocks] = state;
  std::vector<RecordFormat::Segment> segments;
  if (holds_param(format)) {
    segments.push_back({"param bf16", 2 * kTileElements});
    if (format == StateFormat::kSplit) segments.push_back({"residual 16-bit", 2 * kTileElements});
  } else {
    segments.push_back({"master fp32", 4 * kTileElements});
  }
  const Element element = stored_moment(format);
  for (const std::string& name : moment_names(kind)) {
    segments.push_back({fmt::format("{} {}", name, element.type),
                        element.size_bytes * static_cast<std::uint32_t>(kTileElements)});
  }
  if (format == StateFormat::k8Bit) {
    const std::size_t step = scale_step(own_blocks);
    const std::string places = own_blocks ? fmt::format(" per {}", step) : "";
    for (const std::string& name : moment_names(kind)) {
      segments.push_back({fmt::format("{} scale fp32/{}{}", name, kEightBitBlock, places),
                          static_cast<std::uint32_t>(kTileElements / step * sizeof(float))});
    }
  }
  return RecordFormat(std::move(segments));
}

std::string to_string(const StateKind& state) {
  return fmt::format("{} in {}", to_string(state.optimizer), to_string(state.format));
}

StateTraffic state_traffic(const StateKind& state, bool param_elsewhere) {
  const double record = static_cast<double>(record_format(state).tile_bytes()) / kTileElements;
  const bool skips = param_elsewhere && holds_param(state.format);
  return {.read = record - (skips ? sizeof(bf16) : 0), .written = record};
}

double moment_error(StateFormat format) noexcept {
  return stored_moment(format).size_bytes == 2 ? 0x1p-8 : 0.0;
}

void require_compatible(StateFormat format, Rounding rounding, bool param_is_bf16) {
  if (format == StateFormat::kSplit && rounding == Rounding::kStochastic)
    throw Error(
        ErrorCode::kInvalidArgument,
        "state format 'split' cannot use stochastic rounding: parameter and residual together "
        "are the master only under rounding to nearest; choose another format or rounding");
  if (holds_param(format) && !param_is_bf16)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("state format '{}' keeps the parameter in bf16, but the parameters "
                            "have another type; choose parameters in "
                            "bf16, or the format fp32, bf16-moments or 8bit",
                            to_string(format)));
}

void require_initial_accumulator(OptimizerKind kind, float value) {
  if (!(value >= 0 && value <= kAccumulatorMax))
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("initial_accumulator={:g} cannot be a sum of squares; give a number from "
                    "0 to {:g}",
                    value, kAccumulatorMax));
  if (value != 0 && kind != OptimizerKind::kAdagrad)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("initial_accumulator={:g} has no effect, because only adagrad has one "
                            "and the optimizer is "
                            "{}; leave initial_accumulator out, or choose adagrad",
                            value, to_string(kind)));
}

}  // namespace ziggurat
