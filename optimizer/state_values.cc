// SPDX-License-Identifier: Apache-2.0
// optimizer/state_values.cc: converts the segments of a record to fp32 values and back.
#include "optimizer/state_values.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/dtype.h"
#include "base/numerics/rounding.h"
#include "optimizer/eight_bit.h"
#include "optimizer/kernels.h"
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

void write_masters(StateFormat format, std::span<const float> masters,
                   std::span<std::byte> record) {
  auto* const params = reinterpret_cast<bf16*>(record.data());
  for (std::size_t i = 0; i < masters.size(); ++i) {
    switch (format) {
      case StateFormat::kBf16: params[i] = float_to_bf16(masters[i]); break;
      case StateFormat::kSplit: {
        const SplitMaster split = split_master(masters[i]);
        params[i] = split.param;
        params[masters.size() + i] = split.residual;
        break;
      }
      default: std::memcpy(record.data() + i * sizeof(float), &masters[i], sizeof(float));
    }
  }
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
  const Places places(state, record.size());
  ZIGGURAT_CHECK(values.size() <= places.count(), "{} values of a record of {}", values.size(),
                 places.count());
  if (index == 0) {
    std::vector<float> masters(places.count());
    read_masters(state.format, record, masters);
    std::copy_n(masters.begin(), values.size(), values.begin());
    return;
  }
  const std::size_t k = index - 1;
  const std::byte* const moment = places.moment(k, record);
  switch (state.format) {
    case StateFormat::k8Bit:
      return decode_eight_bit(internal::moment_code(state.optimizer, k),
                              {reinterpret_cast<const std::uint8_t*>(moment), values.size()},
                              reinterpret_cast<const float*>(places.scales(k, record)),
                              values.data());
    case StateFormat::kBf16Moments:
    case StateFormat::kBf16:
      for (std::size_t i = 0; i < values.size(); ++i)
        values[i] = bf16_to_float(reinterpret_cast<const bf16*>(moment)[i]);
      return;
    case StateFormat::kFp32:
    case StateFormat::kSplit: std::memcpy(values.data(), moment, values.size_bytes()); return;
  }
}

void write_state_values(const StateKind& state, std::size_t index, std::span<const float> values,
                        std::span<std::byte> record) {
  const Places places(state, record.size());
  ZIGGURAT_CHECK(!values.empty() && values.size() <= places.count(), "{} values for a record of {}",
                 values.size(), places.count());
  const bool is_sum = index == 1 && state.optimizer == OptimizerKind::kAdagrad;
  std::vector<float> padded(places.count(), is_sum ? quiet(values.back()) : 0.0F);
  std::ranges::transform(values, padded.begin(), quiet);
  if (index == 0) return write_masters(state.format, padded, record);
  const std::size_t k = index - 1;
  std::byte* const moment = places.moment(k, record);
  switch (state.format) {
    case StateFormat::k8Bit:
      return encode_eight_bit(internal::moment_code(state.optimizer, k), padded.data(),
                              {reinterpret_cast<std::uint8_t*>(moment), padded.size()},
                              reinterpret_cast<float*>(places.scales(k, record)));
    case StateFormat::kBf16Moments:
    case StateFormat::kBf16:
      std::ranges::transform(padded, reinterpret_cast<bf16*>(moment), float_to_bf16);
      return;
    case StateFormat::kFp32:
    case StateFormat::kSplit:
      std::memcpy(moment, padded.data(), padded.size() * sizeof(float));
      return;
  }
}

}  // namespace ziggurat
