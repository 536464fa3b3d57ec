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
#include "optimizer/record_slice.h"
#include "optimizer/rounding.h"
#include "optimizer/slice.h"
#include "optimizer/state_format.h"
#include "optimizer/state_values.h"
#include "optimizer/update.h"

namespace ziggurat {
namespace {

/// Fills the first moment of a record, also that of padding: nothing is ever added to the sums of
/// padding, and as the smallest of a block they do not change its scale.
void fill_sums(const StateKind& state, float value, std::span<std::byte> record) {
  const internal::Slice slice = internal::arrays_of(state, record);
  std::byte* const sums = slice.moments[0];
  if (has_codes(state.format)) {
    std::uint8_t code = 0;
    float scale = 0;  // all blocks are alike
    encode_eight_bit(internal::moment_code(state.optimizer, 0), &value, {&code, 1}, &scale);
    std::fill_n(sums, slice.count, std::byte{code});
    std::fill_n(slice.scales[0], slice.count / scale_step(state.own_blocks), scale);
    return;
  }
  internal::with_moments(moments_of(state.format), [&](auto element) {
    for (std::size_t i = 0; i < slice.count; ++i) element.store(sums, i, value, kNearestNoise);
  });
}

/// Fills all signed codes of a record with the code of zero, those of padding too. Codes that a
/// later copy of the state does not fill then stay zero, whatever scale their block gets.
void fill_signed_codes(const StateKind& state, std::span<std::byte> record) {
  const internal::Slice slice = internal::arrays_of(state, record);
  for (std::size_t k = 0; k < moment_count(state.optimizer); ++k) {
    if (internal::moment_code(state.optimizer, k) != EightBitCode::kSigned) continue;
    std::fill_n(slice.moments[k], slice.count, std::byte{internal::kSignedZero});
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

void read_masters(StateFormat format, std::span<const std::byte> record, std::span<float> masters) {
  const std::size_t count = masters.size();
  ZIGGURAT_CHECK(record.size() >= count * (rounds_masters(format) ? sizeof(bf16) : sizeof(float)),
                 "{} masters of a record of {} bytes", count, record.size());
  const internal::Slice slice = internal::master_slice(format, internal::only_read(record), count);
  internal::read_masters_from(slice, 0, masters);
}

void write_record(const StateKind& state, std::span<const float> masters,
                  std::span<std::byte> record, float initial_accumulator) {
  const OptimizerKind kind = state.optimizer;
  const StateFormat format = state.format;
  const std::size_t count = masters.size();
  ZIGGURAT_CHECK(initial_accumulator == 0 || info_of(kind).has_initial_accumulator,
                 "an initial accumulator of {} for {}", initial_accumulator, to_string(kind));
  ZIGGURAT_CHECK(count % kTileElements == 0 &&
                     record.size() == record_format(state).record_bytes(count / kTileElements),
                 "{} masters for a record of {} bytes", count, record.size());
  std::memset(record.data(), 0, record.size());
  if (has_codes(format)) fill_signed_codes(state, record);
  if (initial_accumulator != 0) fill_sums(state, initial_accumulator, record);
  if (!holds_param(format)) {
    std::memcpy(record.data(), masters.data(), masters.size_bytes());
    return;
  }
  const internal::Slice slice = internal::master_slice(format, record, count);
  internal::with_masters(masters_of(format), [&](auto element) {
    for (std::size_t i = 0; i < count; ++i)
      element.store(slice, i, quiet(masters[i]), kNearestNoise);
  });
}

}  // namespace ziggurat
