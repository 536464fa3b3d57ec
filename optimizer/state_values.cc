// SPDX-License-Identifier: Apache-2.0
// optimizer/state_values.cc: converts the segments of a record to fp32 values and back.
#include "optimizer/state_values.h"

#include <algorithm>
#include <cstring>

#include "base/bytes.h"
#include "base/check.h"
#include "base/dtype.h"
#include "base/numerics/rounding.h"
#include "optimizer/eight_bit.h"
#include "optimizer/kernels.h"
#include "optimizer/record_masters.h"
#include "optimizer/rounding.h"

namespace ziggurat {
namespace {

/// Finds the arrays of a record.
class Places {
 public:
  Places(const StateKind& state, std::uint64_t record_bytes)
      : shape_(record_format(state)),
        tiles_(shape_.tiles(record_bytes)),
        moments_(moment_count(state.optimizer)),
        first_moment_(shape_.segments().size() - moments_ * (has_scales(state) ? 2 : 1)) {}

  std::size_t count() const { return tiles_ * kTileElements; }
  template <class Byte>
  Byte* moment(std::size_t k, std::span<Byte> record) const {
    return record.data() + shape_.offset(first_moment_ + k, tiles_);
  }
  template <class Byte>
  Byte* scales(std::size_t k, std::span<Byte> record) const {
    return moment(moments_ + k, record);
  }

 private:
  static bool has_scales(const StateKind& state) { return state.format == StateFormat::k8Bit; }

  RecordFormat shape_;
  std::uint64_t tiles_;
  std::size_t moments_;
  std::size_t first_moment_;
};

void write_masters_from(StateFormat format, std::span<const float> masters, std::size_t count,
                        std::uint64_t first, std::span<std::byte> record) {
  auto* const params = reinterpret_cast<bf16*>(record.data()) + first;
  for (std::size_t i = 0; i < masters.size(); ++i) {
    switch (format) {
      case StateFormat::kBf16: params[i] = float_to_bf16(masters[i]); break;
      case StateFormat::kSplit: {
        const SplitMaster split = split_master(masters[i]);
        params[i] = split.param;
        params[count + i] = split.residual;
        break;
      }
      default: std::memcpy(record.data() + (first + i) * sizeof(float), &masters[i], sizeof(float));
    }
  }
}

/// Calls `body` for elements of a record from `first` on, which begins a block, so that in each
/// call the scales of all blocks lie one after the other: with the elements, counted from `first`,
/// and the place of their first scale.
template <class Body>
void for_each_scaled(const StateKind& state, std::uint64_t first, std::size_t count, Body body) {
  const std::size_t step = scale_step(state.own_blocks);
  ZIGGURAT_CHECK(first % step == 0, "codes from {} on begin no block", first);
  const std::size_t together = state.own_blocks ? kEightBitBlock : count;
  for (std::size_t begin = 0; begin < count; begin += together)
    body(begin, std::min(together, count - begin), (first + begin) / step);
}

/// Writes array `index` from values that are no signalling NaN. In 8 bits `first` begins a block,
/// and only the record's last block is short, or that of its parameter.
void write_values(const StateKind& state, std::size_t index, std::uint64_t first,
                  std::span<const float> values, std::span<std::byte> record) {
  const Places places(state, record.size());
  if (index == 0) return write_masters_from(state.format, values, places.count(), first, record);
  const std::size_t k = index - 1;
  std::byte* const moment = places.moment(k, record);
  switch (state.format) {
    case StateFormat::k8Bit: {
      auto* const codes = reinterpret_cast<std::uint8_t*>(moment) + first;
      auto* const scales = reinterpret_cast<float*>(places.scales(k, record));
      const EightBitCode code = internal::moment_code(state.optimizer, k);
      const auto encode = [&](std::size_t begin, std::size_t count, std::size_t scale) {
        encode_eight_bit(code, values.data() + begin, {codes + begin, count}, scales + scale);
      };
      return for_each_scaled(state, first, values.size(), encode);
    }
    case StateFormat::kBf16Moments:
    case StateFormat::kBf16:
      std::ranges::transform(values, reinterpret_cast<bf16*>(moment) + first, float_to_bf16);
      return;
    case StateFormat::kFp32:
    case StateFormat::kSplit:
      std::memcpy(moment + first * sizeof(float), values.data(), values.size_bytes());
      return;
  }
}

/// Returns `values` without signalling NaNs, padded to `count`.
std::vector<float> padded(const StateKind& state, std::size_t index, std::span<const float> values,
                          std::size_t count) {
  const bool is_sum = index == 1 && state.optimizer == OptimizerKind::kAdagrad;
  std::vector<float> all(count, is_sum ? quiet(values.back()) : 0.0F);
  std::ranges::transform(values, all.begin(), quiet);
  return all;
}

}  // namespace

std::optional<std::size_t> find_state(OptimizerKind kind, std::string_view name) {
  const std::vector<std::string> names = state_names(kind);
  const auto found = std::ranges::find(names, name);
  if (found == names.end()) return std::nullopt;
  return static_cast<std::size_t>(found - names.begin());
}

void read_state_values(const StateKind& state, std::size_t index, std::span<const std::byte> record,
                       std::span<float> values) {
  read_state_values(state, index, record, 0, values);
}

void read_state_values(const StateKind& state, std::size_t index, std::span<const std::byte> record,
                       std::uint64_t first, std::span<float> values) {
  const Places places(state, record.size());
  ZIGGURAT_CHECK(first + values.size() <= places.count(), "{} values from {} on of a record of {}",
                 values.size(), first, places.count());
  if (index == 0)
    return internal::read_masters_from(state.format, record, places.count(), first, values);
  const std::size_t k = index - 1;
  const std::byte* const moment = places.moment(k, record);
  switch (state.format) {
    case StateFormat::k8Bit: {
      const auto* const codes = reinterpret_cast<const std::uint8_t*>(moment) + first;
      const auto* const scales = reinterpret_cast<const float*>(places.scales(k, record));
      const EightBitCode code = internal::moment_code(state.optimizer, k);
      const auto decode = [&](std::size_t begin, std::size_t count, std::size_t scale) {
        decode_eight_bit(code, {codes + begin, count}, scales + scale, values.data() + begin);
      };
      return for_each_scaled(state, first, values.size(), decode);
    }
    case StateFormat::kBf16Moments:
    case StateFormat::kBf16:
      for (std::size_t i = 0; i < values.size(); ++i)
        values[i] = bf16_to_float(reinterpret_cast<const bf16*>(moment)[first + i]);
      return;
    case StateFormat::kFp32:
    case StateFormat::kSplit:
      std::memcpy(values.data(), moment + first * sizeof(float), values.size_bytes());
      return;
  }
}

void write_state_values(const StateKind& state, std::size_t index, std::span<const float> values,
                        std::span<std::byte> record) {
  const Places places(state, record.size());
  ZIGGURAT_CHECK(!state.own_blocks, "{} values that may be of several parameters", values.size());
  ZIGGURAT_CHECK(!values.empty() && values.size() <= places.count(), "{} values for a record of {}",
                 values.size(), places.count());
  write_values(state, index, 0, padded(state, index, values, places.count()), record);
}

void write_state_values(const StateKind& state, std::size_t index, std::uint64_t first,
                        std::span<const float> values, std::span<std::byte> record) {
  const Places places(state, record.size());
  const bool padded_block = state.format == StateFormat::k8Bit && !state.own_blocks;
  const std::size_t count = padded_block ? round_up(values.size(), kEightBitBlock) : values.size();
  ZIGGURAT_CHECK(!values.empty() && first + count <= places.count(),
                 "{} values from {} on for a record of {}", values.size(), first, places.count());
  write_values(state, index, first, padded(state, index, values, count), record);
}

}  // namespace ziggurat
