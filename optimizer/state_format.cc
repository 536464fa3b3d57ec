// SPDX-License-Identifier: Apache-2.0
// optimizer/state_format.cc: the segments of each format.
#include "optimizer/state_format.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/checksum.h"
#include "base/dtype.h"
#include "base/error.h"
#include "optimizer/eight_bit.h"
#include "optimizer/gradient.h"
#include "optimizer/rounding.h"
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

Element moment_element(StateFormat format) {
  switch (format) {
    case StateFormat::kBf16Moments:
    case StateFormat::kBf16: return {"bf16", 2};
    case StateFormat::k8Bit: return {"8-bit", 1};
    default: return {"fp32", 4};
  }
}

constexpr std::uint32_t kScaleTileBytes = kTileElements / kEightBitBlock * sizeof(float);

/// The largest initial accumulator: far from where bf16 and the squares added to it overflow.
constexpr float kAccumulatorMax = 1e30F;

/// All of a record's sums of squares, padding's too: nothing is ever added to those, and as the
/// least of a block they do not change its scale.
void fill_sums(StateFormat format, float value, std::size_t count, const RecordFormat& shape,
               std::span<std::byte> record) {
  const std::size_t tiles = count / kTileElements;
  const std::size_t index = format == StateFormat::kSplit ? 2 : 1;
  std::byte* const sums = record.data() + shape.offset(index, tiles);
  if (format == StateFormat::k8Bit) {
    auto* scales = reinterpret_cast<float*>(record.data() + shape.offset(index + 1, tiles));
    const std::vector<float> values(count, value);
    return encode_eight_bit(EightBitCode::kUnsigned, values.data(),
                            {reinterpret_cast<std::uint8_t*>(sums), count}, scales);
  }
  if (moment_element(format).size_bytes == 2) {
    std::fill_n(reinterpret_cast<bf16*>(sums), count, float_to_bf16(value));
  } else {
    std::fill_n(reinterpret_cast<float*>(sums), count, value);
  }
}

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

RecordFormat record_format(OptimizerKind kind, StateFormat format) {
  std::vector<RecordFormat::Segment> segments;
  if (holds_param(format)) {
    segments.push_back({"param bf16", 2 * kTileElements});
    if (format == StateFormat::kSplit) segments.push_back({"residual 16-bit", 2 * kTileElements});
  } else {
    segments.push_back({"master fp32", 4 * kTileElements});
  }
  const Element element = moment_element(format);
  for (const std::string& name : moment_names(kind)) {
    segments.push_back({fmt::format("{} {}", name, element.type),
                        element.size_bytes * static_cast<std::uint32_t>(kTileElements)});
  }
  if (format == StateFormat::k8Bit) {
    for (const std::string& name : moment_names(kind))
      segments.push_back({fmt::format("{} scale fp32/{}", name, kEightBitBlock), kScaleTileBytes});
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
  return moment_element(format).size_bytes == 2 ? 0x1p-8 : 0.0;
}

void require_compatible(StateFormat format, Rounding rounding, bool param_is_bf16) {
  if (format == StateFormat::kSplit && rounding == Rounding::kStochastic)
    throw Error(ErrorCode::kInvalidArgument,
                "state format 'split' with stochastic rounding: parameter and residual together "
                "are the master only under rounding to nearest; choose another format or rounding");
  if (holds_param(format) && !param_is_bf16)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("state format '{}' keeps the parameter in bf16; choose parameters in "
                            "bf16, or the format fp32, bf16-moments or 8bit",
                            to_string(format)));
}

void require_initial_accumulator(OptimizerKind kind, float value) {
  if (!(value >= 0 && value <= kAccumulatorMax))
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("initial_accumulator={:g}: it is a sum of squares: give a number from "
                            "0 to {:g}",
                            value, kAccumulatorMax));
  if (value != 0 && kind != OptimizerKind::kAdagrad)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("initial_accumulator={:g}: only adagrad has one, and the optimizer is "
                            "{}: leave it out, or choose adagrad",
                            value, to_string(kind)));
}

void read_params(StateFormat format, std::span<const std::byte> record,
                 const ParamRounding& rounding, std::uint64_t first_element,
                 TypedSpan<std::byte> out) {
  const std::size_t count = out.count();
  if (holds_param(format)) {
    ZIGGURAT_CHECK(out.dtype == DType::kBFloat16 && record.size() >= out.bytes.size(),
                   "{} parameters in {} of a record of {} bytes", count, to_string(out.dtype),
                   record.size());
    std::memcpy(out.bytes.data(), record.data(), out.bytes.size());
    return;
  }
  ZIGGURAT_CHECK(record.size() >= count * sizeof(float), "{} parameters of a record of {} bytes",
                 count, record.size());
  const std::span masters(reinterpret_cast<const float*>(record.data()), count);
  // Only bf16 is ever rounded with noise.
  const bool nearest = rounding.rounding == Rounding::kNearest || rounding.step == 0;
  if (nearest || out.dtype != DType::kBFloat16) return round_params(masters, out);
  const std::span<bf16> params = out.as<bf16>();
  const std::uint64_t rounding_key = mix_seed(rounding.seed, rounding.step);
  for (std::size_t begin = 0; begin < params.size(); begin += kTileElements) {
    const NoiseKey noise = tile_noise(rounding_key, (first_element + begin) / kTileElements);
    const std::size_t end = std::min(begin + kTileElements, params.size());
    for (std::size_t i = begin; i < end; ++i) {
      const std::uint32_t drawn = noise_bits(noise, static_cast<std::uint32_t>(i - begin));
      params[i] = round_with_noise(quiet(masters[i]), drawn & 0xffffU);
    }
  }
}

void read_masters(StateFormat format, std::span<const std::byte> record, std::span<float> masters) {
  const std::size_t count = masters.size();
  ZIGGURAT_CHECK(record.size() >= count * (format == StateFormat::kBf16 ? 2 : 4),
                 "{} masters of a record of {} bytes", count, record.size());
  if (!holds_param(format)) {
    std::memcpy(masters.data(), record.data(), masters.size_bytes());
    return;
  }
  const auto* params = reinterpret_cast<const bf16*>(record.data());
  for (std::size_t i = 0; i < count; ++i) {
    masters[i] = format == StateFormat::kSplit ? joined({params[i], params[count + i]})
                                               : bf16_to_float(params[i]);
  }
}

void write_record(OptimizerKind kind, StateFormat format, std::span<const float> masters,
                  std::span<std::byte> record, float initial_accumulator) {
  const std::size_t count = masters.size();
  const RecordFormat shape = record_format(kind, format);
  ZIGGURAT_CHECK(initial_accumulator == 0 || kind == OptimizerKind::kAdagrad,
                 "an initial accumulator of {} for {}", initial_accumulator, to_string(kind));
  ZIGGURAT_CHECK(
      count % kTileElements == 0 && record.size() == shape.record_bytes(count / kTileElements),
      "{} masters for a record of {} bytes", count, record.size());
  std::memset(record.data(), 0, record.size());
  if (initial_accumulator != 0) fill_sums(format, initial_accumulator, count, shape, record);
  if (!holds_param(format)) {
    std::memcpy(record.data(), masters.data(), masters.size_bytes());
    return;
  }
  auto* params = reinterpret_cast<bf16*>(record.data());
  for (std::size_t i = 0; i < count; ++i) {
    if (format == StateFormat::kBf16) {
      params[i] = float_to_bf16(masters[i]);
      continue;
    }
    const SplitMaster split = split_master(quiet(masters[i]));
    params[i] = split.param;
    params[count + i] = split.residual;
  }
}

}  // namespace ziggurat
