// SPDX-License-Identifier: Apache-2.0
// optimizer/state_masters.cc: reads and writes parameters and masters of a record.
#include <algorithm>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/checksum.h"
#include "optimizer/eight_bit.h"
#include "optimizer/eight_bit_codes.h"
#include "optimizer/gradient.h"
#include "optimizer/record_masters.h"
#include "optimizer/rounding.h"
#include "optimizer/slice.h"
#include "optimizer/state_format.h"
#include "optimizer/state_values.h"
#include "optimizer/update.h"

namespace ziggurat {
namespace {

/// Fills all sums of squares of a record, also those of padding: nothing is ever added to the sums
/// of padding, and as the smallest of a block they do not change its scale.
void fill_sums(StateFormat format, float value, std::size_t count, const RecordFormat& shape,
               std::span<std::byte> record) {
  const std::size_t tiles = count / kTileElements;
  const std::size_t index = format == StateFormat::kSplit ? 2 : 1;
  std::byte* const sums = record.data() + shape.offset(index, tiles);
  if (format == StateFormat::k8Bit) {
    auto* scales = reinterpret_cast<float*>(record.data() + shape.offset(index + 1, tiles));
    std::uint8_t code = 0;
    float scale = 0;  // all blocks are alike
    encode_eight_bit(EightBitCode::kUnsigned, &value, {&code, 1}, &scale);
    std::fill_n(sums, count, std::byte{code});
    std::fill_n(scales, tiles * shape.segments()[index + 1].tile_bytes / sizeof(float), scale);
    return;
  }
  if (moment_error(format) > 0) {  // bf16
    std::fill_n(reinterpret_cast<bf16*>(sums), count, float_to_bf16(value));
  } else {
    std::fill_n(reinterpret_cast<float*>(sums), count, value);
  }
}

/// Fills all signed codes of a record with the code of zero, those of padding too. Codes that a
/// later copy of the state does not fill then stay zero, whatever scale their block gets.
void fill_signed_codes(OptimizerKind kind, std::size_t count, const RecordFormat& shape,
                       std::span<std::byte> record) {
  for (std::size_t k = 0; k < moment_count(kind); ++k) {
    if (internal::moment_code(kind, k) != EightBitCode::kSigned) continue;
    std::byte* const codes = record.data() + shape.offset(1 + k, count / kTileElements);
    std::fill_n(codes, count, std::byte{internal::kSignedZero});
  }
}

}  // namespace

void read_params(StateFormat format, std::span<const std::byte> record,
                 const ParamRounding& rounding, std::uint64_t first_element,
                 std::span<const DecayRun> runs, TypedSpan<std::byte> out) {
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
  const auto round_at = [&](std::size_t i, NoiseKey key, std::uint64_t index) {
    const std::uint32_t drawn = noise_bits(key, static_cast<std::uint32_t>(index));
    params[i] = round_with_noise(quiet(masters[i]), drawn & 0xffffU);
  };
  for (const DecayRun& run : runs) {
    const std::uint64_t key = run.place ? param_key(rounding_key, run.place->name) : 0;
    for (std::size_t i = run.begin; i < std::min(run.end, params.size()); ++i) {
      if (run.place) {
        const std::uint64_t element = run.place->whole(i - run.begin);
        round_at(i, param_noise(key, element), element);
      } else {
        const std::uint64_t element = first_element + i;
        round_at(i, tile_noise(rounding_key, element / kTileElements), element % kTileElements);
      }
    }
  }
}

void internal::read_masters_from(StateFormat format, std::span<const std::byte> record,
                                 std::size_t count, std::uint64_t first, std::span<float> masters) {
  if (!holds_param(format)) {
    std::memcpy(masters.data(), record.data() + first * sizeof(float), masters.size_bytes());
    return;
  }
  const auto* const params = reinterpret_cast<const bf16*>(record.data()) + first;
  for (std::size_t i = 0; i < masters.size(); ++i) {
    masters[i] = format == StateFormat::kSplit ? joined({params[i], params[count + i]})
                                               : bf16_to_float(params[i]);
  }
}

void read_masters(StateFormat format, std::span<const std::byte> record, std::span<float> masters) {
  const std::size_t count = masters.size();
  ZIGGURAT_CHECK(record.size() >= count * (format == StateFormat::kBf16 ? 2 : 4),
                 "{} masters of a record of {} bytes", count, record.size());
  internal::read_masters_from(format, record, count, 0, masters);
}

void write_record(const StateKind& state, std::span<const float> masters,
                  std::span<std::byte> record, float initial_accumulator) {
  const OptimizerKind kind = state.optimizer;
  const StateFormat format = state.format;
  const std::size_t count = masters.size();
  const RecordFormat shape = record_format(state);
  ZIGGURAT_CHECK(initial_accumulator == 0 || kind == OptimizerKind::kAdagrad,
                 "an initial accumulator of {} for {}", initial_accumulator, to_string(kind));
  ZIGGURAT_CHECK(
      count % kTileElements == 0 && record.size() == shape.record_bytes(count / kTileElements),
      "{} masters for a record of {} bytes", count, record.size());
  std::memset(record.data(), 0, record.size());
  if (format == StateFormat::k8Bit) fill_signed_codes(kind, count, shape, record);
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
