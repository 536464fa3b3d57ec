// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/parse.h: the text of PTX as statements. Knows the grammar, no instruction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace ziggurat::cuda_double::ptx {

/// An operand as written: `%r1`, `-5`, `[%rd1+8]`, `{%f1, %f2}`, `!%p1`, `%r1|%p1`.
struct OperandText {
  std::string name;  ///< a register, a value or a symbol; the base of an address
  std::int64_t offset = 0;
  bool is_address = false;
  bool negated = false;
  std::vector<std::string> parts;  ///< of a vector or a pair
};

struct Statement {
  std::string text;
  std::string guard;  ///< a predicate register; empty: none
  bool guard_not = false;
  std::vector<std::string> opcode;  ///< "ld", "global", "f32"
  std::vector<OperandText> operands;
};

struct Variable {
  std::string name;
  std::uint32_t align = 1;
  std::uint64_t size_bytes = 0;
  std::vector<std::byte> initial;  ///< empty: zero
};

struct Function {
  std::string name;
  std::vector<Variable> parameters;
  std::vector<Variable> shared, local;
  std::vector<std::string> registers;
  std::map<std::string, std::uint32_t> labels;  ///< number of the statement after it
  std::vector<Statement> body;
  std::uint32_t threads_max = 1024;
};

struct Text {
  std::vector<Variable> globals;
  std::vector<Variable> shared;  ///< outside functions; size 0: what the launch gives
  std::vector<Function> kernels;
};

/// Errors: kInvalidArgument, with the line that is not understood.
Text parse(std::string_view ptx);

/// Bytes of a type: "f32", "b64", "pred".
std::uint32_t size_of_type(std::string_view type);

}  // namespace ziggurat::cuda_double::ptx
