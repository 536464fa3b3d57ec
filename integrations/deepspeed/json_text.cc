// SPDX-License-Identifier: Apache-2.0
// integrations/deepspeed/json_text.cc: blanks out what is not JSON, and parses the rest within
// limits.
#include "integrations/deepspeed/json_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>
#include <vector>

#include "base/error.h"

namespace ziggurat {
namespace {

using nlohmann::json;

constexpr int kDepthMax = 6;

[[noreturn]] void refuse_text(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

/// Returns where the string that begins at `at` ends, behind its closing quote.
std::size_t end_of_string(std::string_view text, std::size_t at) {
  for (++at; at < text.size(); ++at) {
    if (text[at] == '\\')
      ++at;
    else if (text[at] == '"')
      return at + 1;
  }
  return text.size();
}

/// Returns where the comment that begins at `at` ends; `at` itself if none begins there.
std::size_t end_of_comment(std::string_view text, std::size_t at) {
  const std::string_view rest = text.substr(at);
  std::size_t length = 0;
  if (rest.starts_with('#') || rest.starts_with("//"))
    length = std::min(rest.find('\n'), rest.size());
  else if (rest.starts_with("/*"))
    length = std::min(rest.find("*/", 2), rest.size() - 2) + 2;
  return at + length;
}

/// Returns the length of the number at the beginning of `rest` if JSON does not have it (Infinity,
/// NaN); otherwise 0.
std::size_t not_finite(std::string_view rest) {
  static constexpr std::array<std::string_view, 3> kWords{"-Infinity", "Infinity", "NaN"};
  for (const std::string_view word : kWords) {
    if (rest.starts_with(word)) return word.size();
  }
  return 0;
}

/// Returns the text as strict JSON.
std::string strict(std::string text) {
  std::size_t comma = std::string::npos;  // the last comma, if nothing has followed it
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t behind = end_of_comment(text, at);
    if (behind > at) {
      std::fill(text.begin() + static_cast<std::ptrdiff_t>(at),
                text.begin() + static_cast<std::ptrdiff_t>(behind), ' ');
      at = behind;
      continue;
    }
    const char c = text[at];
    if (c == '"') {
      at = end_of_string(text, at);
      comma = std::string::npos;
    } else if (const std::size_t word = not_finite(std::string_view(text).substr(at))) {
      std::string null("null");
      null.resize(std::max<std::size_t>(word, 4), ' ');
      text.replace(at, word, null);
      at += null.size();
      comma = std::string::npos;
    } else {
      if ((c == '}' || c == ']') && comma != std::string::npos) text[comma] = ' ';
      if (c == ',')
        comma = at;
      else if (c != ' ' && c != '\t' && c != '\n' && c != '\r')
        comma = std::string::npos;
      ++at;
    }
  }
  return text;
}

}  // namespace

json parse_json_text(std::string_view text, const std::string& file) {
  std::vector<std::set<std::string>> open;  // keys of the objects that are open now
  const auto callback = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > kDepthMax)
      refuse_text(fmt::format("{} is nested deeper than {} levels", file, kDepthMax));
    if (event == json::parse_event_t::object_start) open.emplace_back();
    if (event == json::parse_event_t::object_end) open.pop_back();
    if (event == json::parse_event_t::key && !open.back().insert(parsed.get<std::string>()).second)
      refuse_text(fmt::format("{} has the key \"{}\" twice", file, parsed.get<std::string>()));
    return true;
  };
  try {
    return json::parse(strict(std::string(text)), callback);
  } catch (const json::parse_error& error) {
    refuse_text(fmt::format("{} is not JSON: the error is at byte {}", file, error.byte));
  } catch (const json::exception&) {
    refuse_text(fmt::format("{} has a number that is too large", file));
  }
}

}  // namespace ziggurat
