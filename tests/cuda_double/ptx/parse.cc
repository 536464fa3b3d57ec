// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/parse.cc: see parse.h.
#include "tests/cuda_double/ptx/parse.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>

#include "base/error.h"

namespace ziggurat::cuda_double::ptx {
namespace {

[[noreturn]] void refuse(std::string_view line) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format("PTX: cannot read \"{}\"", line));
}

std::string_view strip(std::string_view text) {
  const auto is_space = [](char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; };
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  int depth = 0;
  std::size_t begin = 0;
  for (std::size_t i = 0; i <= text.size(); ++i) {
    const char c = i < text.size() ? text[i] : separator;
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
    if (i < text.size() && (c != separator || depth > 0)) continue;
    const std::string_view part = strip(text.substr(begin, i - begin));
    if (!part.empty()) parts.push_back(part);
    begin = i + 1;
  }
  return parts;
}

std::vector<std::string_view> words(std::string_view text) {
  std::vector<std::string_view> all;
  std::size_t i = 0;
  while (i < text.size()) {
    const std::size_t begin = text.find_first_not_of(" \t\n\r", i);
    if (begin == std::string_view::npos) break;
    const std::size_t end = std::min(text.find_first_of(" \t\n\r", begin), text.size());
    all.push_back(text.substr(begin, end - begin));
    i = end;
  }
  return all;
}

std::uint64_t number(std::string_view text) {
  int base = 10;
  if (text.starts_with("0x") || text.starts_with("0X")) {
    base = 16;
    text.remove_prefix(2);
  }
  std::uint64_t value = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (result.ec != std::errc() || text.empty()) refuse(text);
  return value;
}

std::string without_comments(std::string_view ptx) {
  std::string text;
  for (std::size_t i = 0; i < ptx.size(); ++i) {
    if (ptx.substr(i, 2) == "//") {
      i = std::min(ptx.find('\n', i), ptx.size()) - 1;
    } else if (ptx.substr(i, 2) == "/*") {
      i = ptx.find("*/", i) + 1;
    } else {
      text += ptx[i];
    }
  }
  return text;
}

/// ".param .align 8 .b8 name[40]" and ".shared .b32 name": what follows the space.
Variable variable(std::string_view text) {
  Variable result;
  const std::size_t assign = text.find('=');
  const std::string_view declared = strip(text.substr(0, assign));
  std::string_view type;
  const auto all = words(declared);
  for (std::size_t i = 0; i + 1 < all.size(); ++i) {
    if (all[i] == ".align") {
      result.align = static_cast<std::uint32_t>(number(all[++i]));
    } else if (all[i] != ".ptr" && all[i] != ".global" && all[i].starts_with('.')) {
      type = all[i].substr(1);
    }
  }
  std::string_view name = all.back();
  const std::uint32_t element = size_of_type(type);
  result.size_bytes = element;
  if (const std::size_t bracket = name.find('['); bracket != std::string_view::npos) {
    const std::string_view count = name.substr(bracket + 1, name.find(']') - bracket - 1);
    result.size_bytes = count.empty() ? 0 : element * number(count);
    name = name.substr(0, bracket);
  }
  result.name = name;
  result.align = std::max(result.align, element);
  if (assign == std::string_view::npos) return result;
  std::string_view values = strip(text.substr(assign + 1));
  if (values.starts_with('{')) values = values.substr(1, values.rfind('}') - 1);
  result.initial.resize(result.size_bytes);
  std::size_t at = 0;
  for (std::string_view value : split(values, ',')) {
    const bool negative = value.starts_with('-');
    if (negative) value.remove_prefix(1);
    // 0f3F800000 and 0d3FF0000000000000 are bits in hexadecimal.
    const bool is_float = value.starts_with("0f") || value.starts_with("0d");
    std::uint64_t bits = is_float ? number(fmt::format("0x{}", value.substr(2))) : number(value);
    if (negative) bits = 0 - bits;
    if (at + element > result.initial.size()) refuse(text);
    std::memcpy(result.initial.data() + at, &bits, element);
    at += element;
  }
  return result;
}

OperandText operand(std::string_view text) {
  OperandText result;
  if (text.starts_with('{') || text.find('|') != std::string_view::npos) {
    const bool pair = !text.starts_with('{');
    if (!pair) text = text.substr(1, text.rfind('}') - 1);
    for (const std::string_view part : split(text, pair ? '|' : ',')) {
      result.parts.emplace_back(part);
    }
    return result;
  }
  if (text.starts_with('[')) {
    result.is_address = true;
    text = strip(text.substr(1, text.rfind(']') - 1));
    if (const std::size_t plus = text.find('+'); plus != std::string_view::npos) {
      std::string_view offset = strip(text.substr(plus + 1));
      const bool negative = offset.starts_with('-');
      if (negative) offset.remove_prefix(1);
      result.offset = static_cast<std::int64_t>(number(offset)) * (negative ? -1 : 1);
      text = strip(text.substr(0, plus));
    }
  }
  result.negated = text.starts_with('!');
  if (result.negated) text = strip(text.substr(1));
  result.name = text;
  return result;
}

Statement statement(std::string_view text) {
  Statement result;
  result.text = text;
  if (text.starts_with('@')) {
    const std::size_t space = text.find_first_of(" \t");
    result.guard = text.substr(1, space - 1);
    result.guard_not = result.guard.starts_with('!');
    if (result.guard_not) result.guard.erase(0, 1);
    text = strip(text.substr(space));
  }
  const std::size_t space = std::min(text.find_first_of(" \t\n"), text.size());
  for (const std::string_view part : split(text.substr(0, space), '.')) {
    // "cp.async::x" and the like stay one word.
    result.opcode.emplace_back(part);
  }
  for (const std::string_view one : split(text.substr(space), ',')) {
    result.operands.push_back(operand(one));
  }
  return result;
}

/// A function's body: statements, declarations and labels, with scopes of their own names.
class Body {
 public:
  explicit Body(Function& function) : function_(function) {}

  void read(std::string_view text) {
    std::size_t begin = 0;
    for (std::size_t i = 0; i < text.size(); ++i) {
      const char c = text[i];
      const bool fresh = strip(text.substr(begin, i - begin)).empty();
      if ((c == '{' || c == '}') && fresh) {
        if (c == '{') scopes_.push_back(++scopes_seen_);
        if (c == '}' && !scopes_.empty()) scopes_.pop_back();
        begin = i + 1;
      } else if (c == ':' && text[begin] != '"' && i + 1 < text.size() && text[i + 1] != ':' &&
                 text[i - 1] != ':') {
        const std::string label(strip(text.substr(begin, i - begin)));
        function_.labels[label] = static_cast<std::uint32_t>(function_.body.size());
        begin = i + 1;
      } else if (c == ';') {
        one(strip(text.substr(begin, i - begin)));
        begin = i + 1;
      }
    }
  }

 private:
  void one(std::string_view text) {
    if (text.empty() || text.starts_with(".pragma") || text.starts_with(".loc ") ||
        text.starts_with(".loc\t")) {
      return;
    }
    if (text.starts_with(".reg")) return registers(text);
    if (text.starts_with(".shared")) {
      function_.shared.push_back(variable(text.substr(7)));
      return;
    }
    if (text.starts_with(".local")) {
      function_.local.push_back(variable(text.substr(6)));
      return;
    }
    if (text.starts_with('.')) refuse(text);
    Statement result = statement(text);
    rename(result.guard);
    for (OperandText& each : result.operands) {
      rename(each.name);
      for (std::string& part : each.parts) rename(part);
    }
    function_.body.push_back(std::move(result));
  }

  void registers(std::string_view text) {
    const auto all = words(text);
    for (std::string_view name : split(text.substr(text.find(all[1]) + all[1].size()), ',')) {
      const std::size_t bracket = name.find('<');
      if (bracket == std::string_view::npos) {
        declare(std::string(name));
        continue;
      }
      const std::uint64_t count = number(name.substr(bracket + 1, name.size() - bracket - 2));
      for (std::uint64_t i = 0; i < count; ++i) {
        declare(fmt::format("{}{}", name.substr(0, bracket), i));
      }
    }
  }

  void declare(std::string name) {
    if (!scopes_.empty()) {
      const std::string inner = fmt::format("{}@{}", name, scopes_.back());
      renamed_[scopes_.back()][name] = inner;
      name = inner;
    }
    function_.registers.push_back(name);
  }

  void rename(std::string& name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      const auto names = renamed_.find(*scope);
      if (names == renamed_.end()) continue;
      const auto found = names->second.find(name);
      if (found == names->second.end()) continue;
      name = found->second;
      return;
    }
  }

  Function& function_;
  std::vector<int> scopes_;
  int scopes_seen_ = 0;
  std::map<int, std::map<std::string, std::string>> renamed_;
};

std::size_t matching_brace(std::string_view text, std::size_t open) {
  int depth = 0;
  for (std::size_t i = open; i < text.size(); ++i) {
    if (text[i] == '{') ++depth;
    if (text[i] == '}' && --depth == 0) return i;
  }
  refuse(text.substr(open, 40));
}

Function kernel(std::string_view head, std::string_view body) {
  Function result;
  const std::size_t open = head.find('(');
  const std::size_t close = head.rfind(')');
  const auto names = words(head.substr(0, open));
  result.name = names.back();
  if (open != std::string_view::npos) {
    for (const std::string_view one : split(head.substr(open + 1, close - open - 1), ',')) {
      if (!one.starts_with(".param")) refuse(one);
      result.parameters.push_back(variable(one.substr(6)));
    }
    const std::string_view limits = head.substr(close + 1);
    if (const std::size_t at = limits.find(".maxntid"); at != std::string_view::npos) {
      std::uint64_t threads = 1;
      const std::string_view line = limits.substr(at + 8, limits.find('\n', at) - at - 8);
      for (const std::string_view dimension : split(line, ',')) threads *= number(dimension);
      result.threads_max = static_cast<std::uint32_t>(threads);
    }
  }
  Body(result).read(body);
  return result;
}

}  // namespace

std::uint32_t size_of_type(std::string_view type) {
  if (type == "pred") return 1;
  const std::size_t digits = type.find_first_of("0123456789");
  if (digits == std::string_view::npos) refuse(type);
  return static_cast<std::uint32_t>(number(type.substr(digits)) / 8);
}

Text parse(std::string_view ptx) {
  Text result;
  const std::string text = without_comments(ptx);
  const std::string_view all = text;
  std::size_t at = 0;
  while (at < all.size()) {
    const std::size_t end = all.find_first_of(";{", at);
    if (end == std::string_view::npos) break;
    std::string_view head = strip(all.substr(at, end - at));
    // .version, .target and .address_size have no end of their own.
    while (head.starts_with(".version") || head.starts_with(".target") ||
           head.starts_with(".address_size") || head.starts_with(".file")) {
      head = strip(head.substr(std::min(head.find('\n'), head.size())));
    }
    for (const std::string_view linkage : {".visible", ".weak", ".extern", ".common"}) {
      if (head.starts_with(linkage)) head = strip(head.substr(linkage.size()));
    }
    const bool function = head.starts_with(".entry") || head.starts_with(".func");
    if (function && all[end] == '{') {
      const std::size_t close = matching_brace(all, end);
      if (head.starts_with(".entry")) {
        result.kernels.push_back(kernel(head.substr(6), all.substr(end + 1, close - end - 1)));
      }
      at = close + 1;
      continue;
    }
    const std::size_t semicolon = all[end] == ';' ? end : all.find(';', matching_brace(all, end));
    if (!function) {
      const std::size_t from = static_cast<std::size_t>(head.data() - all.data());
      const std::string_view whole = strip(all.substr(from, semicolon - from));
      if (whole.starts_with(".global") || whole.starts_with(".const")) {
        result.globals.push_back(variable(whole.substr(whole.find_first_of(" \t"))));
      } else if (whole.starts_with(".shared")) {
        result.shared.push_back(variable(whole.substr(7)));
      } else if (!whole.empty()) {
        refuse(whole.substr(0, 80));
      }
    }
    at = semicolon + 1;
  }
  return result;
}

}  // namespace ziggurat::cuda_double::ptx
