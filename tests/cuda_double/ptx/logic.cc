// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/logic.cc: logic, shifts and byte permutations, PTX ISA 9.7.1 and 9.7.8.
#include <algorithm>
#include <type_traits>

#include "tests/cuda_double/ptx/handlers.h"
#include "tests/cuda_double/ptx/thread.h"
#include "tests/cuda_double/ptx/types.h"

namespace ziggurat::cuda_double::ptx {
namespace {

enum class Gate : std::uint8_t { kAnd, kOr, kXor };

template <Gate kGate>
After gate(Thread& thread, const Instruction& i) {
  const auto a = get<std::uint64_t>(thread, i.s[0]);
  const auto b = get<std::uint64_t>(thread, i.s[1]);
  if constexpr (kGate == Gate::kAnd) put(thread, i.d[0], a & b);
  if constexpr (kGate == Gate::kOr) put(thread, i.d[0], a | b);
  if constexpr (kGate == Gate::kXor) put(thread, i.d[0], a ^ b);
  return After::kGoOn;
}

After invert(Thread& thread, const Instruction& i) {
  put(thread, i.d[0], ~get<std::uint64_t>(thread, i.s[0]));
  return After::kGoOn;
}

template <class T>
After is_zero(Thread& thread, const Instruction& i) {
  put(thread, i.d[0], static_cast<T>(get<T>(thread, i.s[0]) == 0));
  return After::kGoOn;
}

/// "Shift amounts greater than the register width N are clamped to N."
template <class T>
After shift_left(Thread& thread, const Instruction& i) {
  const T a = get<T>(thread, i.s[0]);
  const auto amount = get<std::uint32_t>(thread, i.s[1]);
  put(thread, i.d[0], amount >= 8 * sizeof(T) ? T{0} : static_cast<T>(a << amount));
  return After::kGoOn;
}

template <class T>
After shift_right(Thread& thread, const Instruction& i) {
  const T a = get<T>(thread, i.s[0]);
  const auto amount = get<std::uint32_t>(thread, i.s[1]);
  const T beyond = std::is_signed_v<T> && a < 0 ? static_cast<T>(-1) : T{0};
  put(thread, i.d[0], amount >= 8 * sizeof(T) ? beyond : static_cast<T>(a >> amount));
  return After::kGoOn;
}

/// shf: the detail is 1 for right, detail2 is 1 for .clamp.
After funnel_shift(Thread& thread, const Instruction& i) {
  const std::uint64_t both =
      get<std::uint32_t>(thread, i.s[0]) | std::uint64_t{get<std::uint32_t>(thread, i.s[1])} << 32;
  const auto asked = get<std::uint32_t>(thread, i.s[2]);
  const std::uint32_t amount = i.detail2 != 0 ? std::min(asked, 32u) : asked & 31;
  const std::uint64_t result = i.detail != 0 ? both >> amount : both << amount >> 32;
  put(thread, i.d[0], static_cast<std::uint32_t>(result));
  return After::kGoOn;
}

After lop3(Thread& thread, const Instruction& i) {
  const auto a = get<std::uint32_t>(thread, i.s[0]);
  const auto b = get<std::uint32_t>(thread, i.s[1]);
  const auto c = get<std::uint32_t>(thread, i.s[2]);
  const auto table = get<std::uint32_t>(thread, i.s[3]);
  std::uint32_t result = 0;
  for (std::uint32_t row = 0; row < 8; ++row) {
    if ((table >> row & 1) == 0) continue;
    result |= ((row & 4) != 0 ? a : ~a) & ((row & 2) != 0 ? b : ~b) & ((row & 1) != 0 ? c : ~c);
  }
  put(thread, i.d[0], result);
  return After::kGoOn;
}

/// Each four bits of the selector choose a byte; the highest of them copies its sign instead.
After permute_bytes(Thread& thread, const Instruction& i) {
  const std::uint64_t bytes =
      get<std::uint32_t>(thread, i.s[0]) | std::uint64_t{get<std::uint32_t>(thread, i.s[1])} << 32;
  const auto selector = get<std::uint32_t>(thread, i.s[2]);
  std::uint32_t result = 0;
  for (std::uint32_t n = 0; n < 4; ++n) {
    const std::uint32_t choice = selector >> (4 * n) & 0xf;
    std::uint32_t byte = static_cast<std::uint32_t>(bytes >> (8 * (choice & 7))) & 0xff;
    if ((choice & 8) != 0) byte = (byte & 0x80) != 0 ? 0xff : 0;
    result |= byte << (8 * n);
  }
  put(thread, i.d[0], result);
  return After::kGoOn;
}

}  // namespace

Handler logic_handler(const Opcode& opcode, Instruction& instruction) {
  const std::string& base = opcode.base();
  const std::string& type = opcode.type();
  if (base == "shf" && opcode.parts.size() == 4 && type == "b32") {
    instruction.detail = opcode.has("r") ? 1 : 0;
    instruction.detail2 = opcode.has("clamp") ? 1 : 0;
    return &funnel_shift;
  }
  if (opcode.parts.size() != 2) return nullptr;
  if (base == "and") return &gate<Gate::kAnd>;
  if (base == "or") return &gate<Gate::kOr>;
  if (base == "xor") return &gate<Gate::kXor>;
  if (base == "not") return &invert;
  if (base == "lop3" && type == "b32") return &lop3;
  if (base == "prmt" && type == "b32") return &permute_bytes;
  if (base == "cnot") {
    return for_bits(type, []<class T>(T) -> Handler { return &is_zero<T>; });
  }
  if (base == "shl") {
    return for_bits(type, []<class T>(T) -> Handler { return &shift_left<T>; });
  }
  if (base == "shr") {
    return for_integer(type, []<class T>(T) -> Handler { return &shift_right<T>; });
  }
  return nullptr;
}

}  // namespace ziggurat::cuda_double::ptx
