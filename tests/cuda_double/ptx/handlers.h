// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/handlers.h: which handler an opcode has, a function for each chapter of the
// PTX ISA. Null: not one of these.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tests/cuda_double/ptx/program.h"

namespace ziggurat::cuda_double::ptx {

/// "ld.global.f32" as parts.
struct Opcode {
  const std::vector<std::string>& parts;
  const std::string& base() const { return parts.front(); }
  const std::string& type() const { return parts.back(); }
  bool has(std::string_view modifier) const;
};

Handler integer_handler(const Opcode& opcode, Instruction& instruction);     // 9.7.1
Handler logic_handler(const Opcode& opcode, Instruction& instruction);       // 9.7.8
Handler float_handler(const Opcode& opcode, Instruction& instruction);       // 9.7.3
Handler comparison_handler(const Opcode& opcode, Instruction& instruction);  // 9.7.6
Handler conversion_handler(const Opcode& opcode, Instruction& instruction);  // 9.7.9: cvt, cvta
Handler memory_handler(const Opcode& opcode, Instruction& instruction);      // 9.7.9: mov, ld, st
Handler atomic_handler(const Opcode& opcode, Instruction& instruction);      // 9.7.13: atom, red
Handler control_handler(const Opcode& opcode, Instruction& instruction);     // 9.7.12, .13

/// The rounding of add, mul, cvt, ...: what .rn and the like say.
enum class Rounding : std::uint8_t { kNearest, kZero, kDown, kUp };
std::optional<Rounding> rounding_of(const Opcode& opcode, bool to_integer);

}  // namespace ziggurat::cuda_double::ptx
