// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/decode.cc: see decode.h.
#include "tests/cuda_double/ptx/decode.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "base/error.h"
#include "tests/cuda_double/ptx/handlers.h"

namespace ziggurat::cuda_double::ptx {
namespace {

std::uint32_t aligned(std::uint32_t offset, std::uint32_t align) {
  return (offset + align - 1) / align * align;
}

class Decoder {
 public:
  Decoder(const Function& function, const std::map<std::string, std::uint64_t>& globals)
      : function_(function), symbols_(globals) {}

  Kernel run(const std::vector<Variable>& shared) {
    kernel_.name = function_.name;
    kernel_.threads_max = function_.threads_max;
    declare_registers();
    declare_parameters();
    for (const Variable& one : function_.shared) place(one, kernel_.shared_bytes);
    for (const Variable& one : shared) {
      if (one.size_bytes != 0) place(one, kernel_.shared_bytes);
    }
    // What the launch gives begins behind the rest; every `extern __shared__` is at its start.
    kernel_.shared_bytes = aligned(kernel_.shared_bytes, 16);
    for (const Variable& one : shared) {
      if (one.size_bytes == 0) symbols_[one.name] = kernel_.shared_bytes;
    }
    for (const Variable& one : function_.local) place(one, kernel_.local_bytes);
    kernel_.local_bytes = aligned(kernel_.local_bytes, 16);
    for (const Statement& statement : function_.body) {
      kernel_.code.push_back(instruction(statement));
    }
    // What runs off the end returns.
    Statement end;
    end.opcode = {"ret"};
    end.text = "the end";
    kernel_.code.push_back(instruction(end));
    return std::move(kernel_);
  }

 private:
  void declare_registers() {
    for (const char* name : kSpecialRegisters) {
      registers_.emplace(name, static_cast<int>(registers_.size()));
    }
    for (const std::string& name : function_.registers) {
      registers_.emplace(name, static_cast<int>(registers_.size()));
    }
    kernel_.registers = static_cast<int>(registers_.size());
  }

  void declare_parameters() {
    std::uint32_t offset = 0;
    for (const Variable& one : function_.parameters) {
      offset = aligned(offset, one.align);
      symbols_[one.name] = offset;
      const auto size = static_cast<std::uint32_t>(one.size_bytes);
      kernel_.parameters.push_back({offset, size});
      offset += size;
    }
    kernel_.parameter_bytes = offset;
  }

  void place(const Variable& variable, std::uint32_t& size_bytes) {
    size_bytes = aligned(size_bytes, variable.align);
    symbols_[variable.name] = size_bytes;
    size_bytes += static_cast<std::uint32_t>(variable.size_bytes);
  }

  [[noreturn]] void refuse(const Statement& statement, std::string_view why) const {
    throw Error(ErrorCode::kUnimplemented,
                fmt::format("kernel {}: \"{}\": {}", function_.name, statement.text, why));
  }

  /// A register, a symbol's address, or a value: 5, -5, 0x1F, 5U, 0f3F800000, 0d3FF0000000000000.
  Operand operand(const Statement& statement, std::string_view name) const {
    if (name == "_") return {};
    if (const auto found = registers_.find(std::string(name)); found != registers_.end()) {
      return {found->second, 0};
    }
    if (const auto found = symbols_.find(std::string(name)); found != symbols_.end()) {
      return {-1, found->second};
    }
    if (name == "WARP_SZ") return {-1, 32};
    const bool negative = name.starts_with('-');
    if (negative) name.remove_prefix(1);
    int base = 10;
    if (name.size() > 2 && name[0] == '0' &&
        std::string_view("xXfFdD").find(name[1]) != std::string_view::npos) {
      base = 16;
      name.remove_prefix(2);
    }
    if (name.ends_with('U')) name.remove_suffix(1);
    std::uint64_t value = 0;
    const auto result = std::from_chars(name.data(), name.data() + name.size(), value, base);
    if (result.ec != std::errc() || result.ptr != name.data() + name.size()) {
      refuse(statement, fmt::format("what is {}?", name));
    }
    return {-1, negative ? 0 - value : value};
  }

  void spread(const Statement& statement, const OperandText& text, Operand (&to)[4], std::size_t at,
              Instruction& result) const {
    if (text.parts.empty()) {
      to[at] = operand(statement, text.name);
      if (text.is_address) result.offset = text.offset;
      return;
    }
    if (at + text.parts.size() > 4) refuse(statement, "a vector of more than four");
    for (std::size_t n = 0; n < text.parts.size(); ++n) {
      to[at + n] = operand(statement, text.parts[n]);
    }
  }

  Instruction instruction(const Statement& statement) {
    Instruction result;
    result.number = static_cast<std::uint32_t>(kernel_.code.size());
    result.text = statement.text;
    result.guard_not = statement.guard_not;
    if (!statement.guard.empty()) result.guard = operand(statement, statement.guard).reg;
    const Opcode opcode{statement.opcode};
    const auto& operands = statement.operands;
    if (opcode.base() == "call") refuse(statement, "calls are not done: inline the function");
    if (opcode.base() == "bra") {
      const auto label = function_.labels.find(operands.at(0).name);
      if (label == function_.labels.end()) refuse(statement, "no such label");
      result.target = label->second;
    } else if (opcode.base() == "bar" || opcode.base() == "barrier") {
      // Barriers have no destination, and bar.warp's only operand stands in its place.
      result.count = static_cast<std::uint8_t>(std::max<std::size_t>(operands.size(), 1));
      for (const OperandText& one : operands) result.d[0] = operand(statement, one.name);
    } else if (!operands.empty()) {
      spread(statement, operands[0], result.d, 0, result);
      for (std::size_t n = 1; n < operands.size(); ++n) {
        if (n > 4) refuse(statement, "too many operands");
        spread(statement, operands[n], result.s, n - 1, result);
      }
      note_vectors(statement, result);
    }
    if (opcode.base() == "brx" || operands.size() > 5) refuse(statement, "not done");
    for (const auto find :
         {&integer_handler, &logic_handler, &float_handler, &comparison_handler,
          &conversion_handler, &memory_handler, &atomic_handler, &control_handler}) {
      result.run = find(opcode, result);
      if (result.run != nullptr) return result;
    }
    refuse(statement, "the interpreter does not know this instruction");
  }

  void note_vectors(const Statement& statement, Instruction& result) const {
    const auto& operands = statement.operands;
    const std::string& base = statement.opcode.front();
    const bool pair = base == "setp" || base == "shfl";
    if (!pair && !operands[0].parts.empty()) {
      result.count = static_cast<std::uint8_t>(operands[0].parts.size());
      result.detail2 = 1;  // mov: unpack
    } else if (operands.size() > 1 && !operands[1].parts.empty()) {
      result.count = static_cast<std::uint8_t>(operands[1].parts.size());
    }
    // A negated predicate is setp's third source, or the source of a vote or a mov.
    const bool negated = std::any_of(operands.begin() + 1, operands.end(),
                                     [](const OperandText& one) { return one.negated; });
    if (negated && base == "setp") result.detail2 = 0x10;
    if (negated && base == "vote") result.detail2 = 1;
    if (negated && base != "setp" && base != "vote") refuse(statement, "a negated operand");
  }

  const Function& function_;
  std::map<std::string, std::uint64_t> symbols_;
  std::map<std::string, int> registers_;
  Kernel kernel_;
};

}  // namespace

bool Opcode::has(std::string_view modifier) const {
  return std::find(parts.begin() + 1, parts.end(), modifier) != parts.end();
}

Kernel decode(const Function& function, const std::vector<Variable>& shared,
              const std::map<std::string, std::uint64_t>& globals) {
  return Decoder(function, globals).run(shared);
}

}  // namespace ziggurat::cuda_double::ptx
