// SPDX-License-Identifier: Apache-2.0
// tests/support/plain_param.h: a parameter and its optimizer state in plain arrays of whole tiles:
// what an engine that keeps them anywhere must equal, bit for bit.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "optimizer/state_values.h"
#include "optimizer/update.h"
#include "tests/support/typed_array.h"
#include "tiers/store/record_hash.h"

namespace ziggurat::testing {

class PlainParam {
 public:
  /// `first_element`: whole tiles of the parameters before it in the model; `place`: with noise of
  /// its own.
  explicit PlainParam(const TypedArray& values, StateKind state = {},
                      std::uint64_t first_element = 0, std::optional<ParamPlace> place = {})
      : state_(state),
        first_element_(first_element),
        place_(place),
        count_(values.count()),
        tiles_((count_ + kTileElements - 1) / kTileElements),
        record_(fresh_record(values)),
        param_(values.padded(tiles_ * kTileElements)) {}

  /// One that its optimizer makes, as the parameter's own step `settings.t`.
  void step(OptimizerStep::Settings settings, const TypedArray& gradient) {
    settings.kind = state_.optimizer;
    const TypedArray padded = gradient.padded(tiles_ * kTileElements);
    const std::array<DecayRun, 1> runs{
        {{.begin = 0, .end = tiles_ * kTileElements, .decay = true, .place = place_}}};
    update_record(OptimizerStep::make(settings),
                  {.format = state_.format,
                   .record = record_,
                   .grad = padded.span(),
                   .param = param_.span(),
                   .first_element = first_element_},
                  runs);
  }
  /// The trainer's own values, in place of the masters; moments stay.
  void write(const TypedArray& values) {
    const std::vector<std::byte> fresh = fresh_record(values);
    const std::size_t of_master = state_.format == StateFormat::kSplit ? 2 : 1;
    const std::uint64_t master_bytes = record_format(state_).offset(of_master, tiles_);
    std::copy_n(fresh.begin(), master_bytes, record_.begin());
    param_ = values.padded(tiles_ * kTileElements);
  }

  /// Its state by name, widened to fp32; and written, a master as the parameter too.
  std::vector<float> state(std::string_view name) const {
    std::vector<float> values(count_);
    read_state_values(state_, *find_state(state_.optimizer, name), record_, values);
    return values;
  }
  void write_state(std::string_view name, std::span<const float> values) {
    write_state_values(state_, *find_state(state_.optimizer, name), values, record_);
    if (name != "master") return;
    for (std::size_t i = 0; i < values.size(); ++i) param_.set(i, values[i]);
  }

  TypedArray values() const {
    TypedArray own = param_;
    own.bytes.resize(count_ * size_bytes(own.dtype));
    return own;
  }
  std::uint64_t padded_count() const { return tiles_ * kTileElements; }

 private:
  std::vector<std::byte> fresh_record(const TypedArray& values) const {
    std::vector<float> masters(tiles_ * kTileElements);
    for (std::size_t i = 0; i < values.count(); ++i) masters[i] = values.at(i);
    std::vector<std::byte> record(record_format(state_).record_bytes(tiles_));
    write_record(state_.optimizer, state_.format, masters, record);
    return record;
  }

  StateKind state_;
  std::uint64_t first_element_;
  std::optional<ParamPlace> place_;
  std::size_t count_;
  std::size_t tiles_;
  std::vector<std::byte> record_;
  TypedArray param_;
};

}  // namespace ziggurat::testing
