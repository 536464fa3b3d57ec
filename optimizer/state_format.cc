// SPDX-License-Identifier: Apache-2.0
// optimizer/state_format.cc: lists the segments of each format.
#include "optimizer/state_format.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "optimizer/eight_bit.h"
#include "optimizer/state_values.h"

namespace ziggurat {
namespace {

constexpr auto kFormatNames = [] {
  std::array<std::string_view, kStateFormatCount> names;
  for (std::size_t i = 0; i < names.size(); ++i)
    names[i] = info_of(static_cast<StateFormat>(i)).name;
  return names;
}();

/// Returns the names of the formats whose records do not hold the parameter.
std::string formats_of_any_param() {
  std::vector<std::string_view> names;
  for (std::size_t i = 0; i < kStateFormatCount; ++i) {
    if (!holds_param(static_cast<StateFormat>(i))) names.push_back(kFormatNames[i]);
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

/// The largest initial accumulator. Its sums with squares are far from overflow, also in bf16.
constexpr float kAccumulatorMax = 1e30F;

}  // namespace

std::string_view to_string(StateFormat format) noexcept {
  return kFormatNames[static_cast<std::size_t>(format)];
}

std::span<const std::string_view> state_format_names() noexcept { return kFormatNames; }

std::optional<StateFormat> parse_state_format(std::string_view name) noexcept {
  for (std::size_t i = 0; i < kFormatNames.size(); ++i) {
    if (kFormatNames[i] == name) return static_cast<StateFormat>(i);
  }
  return std::nullopt;
}

std::vector<std::string> state_names(OptimizerKind kind) {
  const OptimizerInfo its = info_of(kind);
  std::vector<std::string> names{"master"};
  for (std::size_t k = 0; k < moment_count(kind); ++k) names.emplace_back(its.moments[k].name);
  return names;
}

RecordFormat record_format(const StateKind& state) {
  const auto [kind, format, own_blocks] = state;
  std::vector<RecordFormat::Segment> segments;
  if (holds_param(format)) {
    segments.push_back({"param bf16", 2 * kTileElements});
    if (has_residual(format)) segments.push_back({"residual 16-bit", 2 * kTileElements});
  } else {
    segments.push_back({"master fp32", 4 * kTileElements});
  }
  const MomentInfo kept = info_of(moments_of(format));
  const std::vector<std::string> arrays = state_names(kind);
  const std::span moments = std::span(arrays).subspan(1);
  for (const std::string& name : moments) {
    segments.push_back({fmt::format("{} {}", name, kept.type),
                        static_cast<std::uint32_t>(element_bytes(kept.element) * kTileElements)});
  }
  if (has_codes(format)) {
    const std::size_t step = scale_step(own_blocks);
    const std::string places = own_blocks ? fmt::format(" per {}", step) : "";
    for (const std::string& name : moments) {
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

void require_compatible(StateFormat format, Rounding rounding, bool param_is_bf16) {
  if (has_residual(format) && rounding == Rounding::kStochastic)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("state format '{}' cannot use stochastic rounding: parameter and "
                            "residual together are the master only under rounding to nearest; "
                            "choose another format or rounding",
                            to_string(format)));
  if (holds_param(format) && !param_is_bf16)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("state format '{}' keeps the parameter in bf16, but the parameters "
                            "have another type; choose parameters in bf16, or one of the formats "
                            "{}",
                            to_string(format), formats_of_any_param()));
}

void require_initial_accumulator(OptimizerKind kind, float value) {
  if (!(value >= 0 && value <= kAccumulatorMax))
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("initial_accumulator={:g} cannot be a sum of squares; give a number from "
                    "0 to {:g}",
                    value, kAccumulatorMax));
  const auto accumulating = optimizers_that(&OptimizerInfo::has_initial_accumulator);
  if (value != 0 && !info_of(kind).has_initial_accumulator)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("initial_accumulator={:g} has no effect, because only {} has one and "
                            "the optimizer is {}; leave initial_accumulator out, or choose {}",
                            value, fmt::join(accumulating, " or "), to_string(kind),
                            fmt::join(accumulating, " or ")));
}

}  // namespace ziggurat
