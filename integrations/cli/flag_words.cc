// SPDX-License-Identifier: Apache-2.0
// integrations/cli/flag_words.cc: knows the settings of all commands, and finds them between a
// message's backticks.
#include "integrations/cli/flag_words.h"

#include <set>

#include "integrations/cli/commands.h"
#include "integrations/cli/plan_options.h"

namespace ziggurat::cli {
namespace {

bool is_setting(std::string_view name) {
  static const std::set<std::string, std::less<>> names = [] {
    std::set<std::string, std::less<>> all;
    const auto add = [&](const auto& table) {
      for (const Setting& setting : table) all.insert(underscored(setting.name));
    };
    add(train_table());
    add(sample_settings());
    add(export_settings());
    add(plan_settings());
    add(bench_io_settings());
    all.insert("path");  // `bench io` takes it outside its table
    return all;
  }();
  return names.contains(name);
}

/// Returns what stands between two backticks: a setting as a flag, anything else with its
/// backticks.
std::string in_flag(std::string_view words) {
  const std::size_t equals = words.find('=');
  const std::string_view name = words.substr(0, equals);
  if (!is_setting(name)) return "`" + std::string(words) + "`";
  std::string flag = "--" + dashed(name);
  if (equals != std::string_view::npos) flag += " " + std::string(words.substr(equals + 1));
  return flag;
}

}  // namespace

std::string in_flags(std::string_view message) {
  std::string text;
  for (;;) {
    const std::size_t open = message.find('`');
    const std::size_t close = open == std::string_view::npos ? open : message.find('`', open + 1);
    if (close == std::string_view::npos) return text += message;
    text += message.substr(0, open);
    text += in_flag(message.substr(open + 1, close - open - 1));
    message.remove_prefix(close + 1);
  }
}

}  // namespace ziggurat::cli
