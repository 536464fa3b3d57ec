// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/program.h: a kernel ready to run: instructions with their handlers.
//
// A register is 64 bits; narrower values lie in its low bits, the rest is zero. Special registers
// (%tid.x, ...) are the first registers. Addresses of shared, local and parameter memory are
// offsets; a generic address of them has the space in its top byte.
#pragma once

#include <driver_types.h>

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace ziggurat::cuda_double::ptx {

struct Thread;
struct Instruction;

/// What a thread does after an instruction.
enum class After : std::uint8_t { kGoOn, kWait, kExit };
using Handler = After (*)(Thread&, const Instruction&);

enum class Space : std::uint8_t { kGeneric, kGlobal, kShared, kLocal, kParam };
inline constexpr int kSpaceShift = 56;
constexpr std::uint64_t generic(Space space, std::uint64_t offset) noexcept {
  return (static_cast<std::uint64_t>(space) << kSpaceShift) | offset;
}

/// A register, or a value.
struct Operand {
  int reg = -1;
  std::uint64_t value = 0;
};

struct Instruction {
  Handler run = nullptr;
  int guard = -1;  ///< the predicate register of @%p; -1: none
  bool guard_not = false;
  bool is_fence = false;  ///< orders memory among blocks
  Space space = Space::kGeneric;
  std::uint8_t count = 1;   ///< elements of a vector
  std::uint8_t detail = 0;  ///< what the handler makes of it: a comparison, a mode, a rounding
  std::uint8_t detail2 = 0;
  Operand d[4];
  Operand s[4];
  std::int64_t offset = 0;   ///< of an address
  std::uint32_t target = 0;  ///< of a branch
  std::uint32_t number = 0;
  std::string text;  ///< as in the PTX, for messages
};

/// Order of the special registers in every register file.
inline constexpr const char* kSpecialRegisters[] = {
    "%tid.x",   "%tid.y",       "%tid.z",       "%ntid.x",      "%ntid.y",      "%ntid.z",
    "%ctaid.x", "%ctaid.y",     "%ctaid.z",     "%nctaid.x",    "%nctaid.y",    "%nctaid.z",
    "%laneid",  "%warpid",      "%nwarpid",     "%nsmid",       "%smid",        "%clock64",
    "%clock",   "%lanemask_eq", "%lanemask_lt", "%lanemask_le", "%lanemask_gt", "%lanemask_ge"};
inline constexpr int kSpecialCount = static_cast<int>(std::size(kSpecialRegisters));

struct Parameter {
  std::uint32_t offset = 0;
  std::uint32_t size_bytes = 0;
};

struct Kernel {
  std::string name;
  std::vector<Parameter> parameters;
  std::uint32_t parameter_bytes = 0;
  std::uint32_t shared_bytes = 0;  ///< besides what the launch gives
  std::uint32_t local_bytes = 0;
  std::uint32_t threads_max = 1024;
  int registers = kSpecialCount;
  std::vector<Instruction> code;
};

/// What ends a kernel, and with it the context.
class Fault : public std::runtime_error {
 public:
  Fault(cudaError_t fault_error, const std::string& text)
      : std::runtime_error(text), error(fault_error) {}
  cudaError_t error;
};

}  // namespace ziggurat::cuda_double::ptx
