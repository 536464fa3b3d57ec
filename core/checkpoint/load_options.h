// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/load_options.h: what of a state is loaded, and under which names.
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

/// Parameters that have other names in the state than in the model. A * in `from` stands for any
/// characters, and the one in `to` for the same ones.
struct LoadRename {
  std::string from;
  std::string to;

  /// What the model calls `name`; nothing where `from` does not stand for it.
  std::optional<std::string> of(std::string_view name) const;
  friend bool operator==(const LoadRename&, const LoadRename&) = default;
};

/// "transformer.*=*;head.weight=wte.weight". Errors: kInvalidArgument naming the rule.
std::vector<LoadRename> parse_load_renames(std::string_view text);
/// What parse_load_renames() reads as the same rules.
std::string to_text(std::span<const LoadRename> renames);

struct LoadOptions {
  /// Masters alone: training begins at step 0 with moments of zero.
  bool weights_only = false;
  /// The new state continues the source's line of history, whose newest step it is; otherwise it
  /// begins a child of it.
  bool continues_line = false;
  /// The first rule that stands for a name counts; one that stands for none is an error.
  std::vector<LoadRename> renames = {};
  /// Given: parameters that the state lacks begin with these fp32 values, of elements [first, first
  /// + values.size()) of `unit`'s flat parameters, and those that the model lacks are left out;
  /// notes list both. Not given: either is an error.
  std::function<void(UnitId unit, std::uint64_t first, std::span<float> values)> initialize = {};
  /// The source is the store whose place the new one takes: a rounding that it does not record, the
  /// new one does not record either.
  bool in_place = false;
};

}  // namespace ziggurat
