// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/load_options.h: what is loaded of a state, and under which names.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/sharding/model_spec.h"

namespace ziggurat {

/// Renames parameters that have other names in the state than in the model. A * in `from` stands
/// for any characters, and the * in `to` for the same ones.
struct LoadRename {
  std::string from;
  std::string to;

  /// Returns what the model calls `name`; nothing if `from` does not stand for it.
  std::optional<std::string> of(std::string_view name) const;
  friend bool operator==(const LoadRename&, const LoadRename&) = default;
};

/// Reads rules like "transformer.*=*;head.weight=wte.weight". Errors: kInvalidArgument naming the
/// wrong rule.
std::vector<LoadRename> parse_load_renames(std::string_view text);
/// Returns a text that parse_load_renames() reads as the same rules.
std::string to_text(std::span<const LoadRename> renames);

struct LoadOptions {
  /// Loads only masters: training begins at step 0 with moments of zero.
  bool weights_only = false;
  /// True if the new state continues the source's line of history, whose newest step the source is.
  /// Otherwise the new state begins a child of that line.
  bool continues_line = false;
  /// Renames parameters by the first rule that stands for a name. A rule that stands for no name is
  /// an error.
  std::vector<LoadRename> renames = {};
  /// Gives fp32 values for elements [first, first + values.size()) of `unit`'s flat parameters. If
  /// it is set, parameters that the state lacks begin with these values, parameters that the model
  /// lacks are left out, and notes list both. If it is not set, either is an error.
  std::function<void(UnitId unit, std::uint64_t first, std::span<float> values)> initialize = {};
  /// True if the source is the store whose place the new one takes: if the source records no
  /// rounding, the new store does not record one either.
  bool in_place = false;
};

}  // namespace ziggurat
