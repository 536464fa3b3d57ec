// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/memory.cc: mov, ld and st, PTX ISA 9.7.9.
#include <fmt/format.h>

#include <algorithm>

#include "tests/cuda_double/ptx/handlers.h"
#include "tests/cuda_double/ptx/memory_access.h"
#include "tests/cuda_double/ptx/parse.h"
#include "tests/cuda_double/ptx/thread.h"
#include "tests/cuda_double/ptx/types.h"

namespace ziggurat::cuda_double::ptx {
namespace {

After move(Thread& thread, const Instruction& i) {
  put(thread, i.d[0], get<std::uint64_t>(thread, i.s[0]));
  return After::kGoOn;
}

/// mov.b64 %rd1, {%r1, %r2}: the first is the lowest. The detail is an element's size in bits.
After pack(Thread& thread, const Instruction& i) {
  const std::uint64_t mask = (std::uint64_t{1} << i.detail) - 1;
  std::uint64_t all = 0;
  for (std::uint8_t n = 0; n < i.count; ++n) {
    all |= (get<std::uint64_t>(thread, i.s[n]) & mask) << (n * i.detail);
  }
  put(thread, i.d[0], all);
  return After::kGoOn;
}

After unpack(Thread& thread, const Instruction& i) {
  const std::uint64_t mask = (std::uint64_t{1} << i.detail) - 1;
  const auto all = get<std::uint64_t>(thread, i.s[0]);
  for (std::uint8_t n = 0; n < i.count; ++n) put(thread, i.d[n], all >> (n * i.detail) & mask);
  return After::kGoOn;
}

std::byte* global(GlobalMemory& memory, std::uint64_t address, std::uint32_t size_bytes, Use use) {
  switch (use) {
    case Use::kRead: return memory.read(address, size_bytes);
    case Use::kWrite: return memory.write(address, size_bytes);
    case Use::kStrongRead: return memory.read(address, size_bytes, Strength::kStrong);
    case Use::kUpdate:
      static_cast<void>(memory.read(address, size_bytes, Strength::kStrong));
      [[fallthrough]];
    case Use::kStrongWrite: break;
  }
  return memory.write(address, size_bytes, Strength::kStrong);
}

constexpr std::uint8_t kSigned = 1;
constexpr std::uint8_t kStrong = 2;

/// The detail is an element's size in bytes; detail2: kSigned, kStrong.
After load(Thread& thread, const Instruction& i) {
  const auto size = static_cast<std::uint32_t>(i.detail);
  const std::byte* bytes = access(thread, i, i.s[0], size * i.count,
                                  (i.detail2 & kStrong) != 0 ? Use::kStrongRead : Use::kRead);
  for (std::uint8_t n = 0; n < i.count; ++n) {
    std::uint64_t value = 0;
    std::memcpy(&value, bytes + n * size, size);
    if ((i.detail2 & kSigned) != 0 && size < 8 && (value >> (8 * size - 1) & 1) != 0) {
      value |= ~std::uint64_t{0} << (8 * size);
    }
    put(thread, i.d[n], value);
  }
  return After::kGoOn;
}

After store(Thread& thread, const Instruction& i) {
  const auto size = static_cast<std::uint32_t>(i.detail);
  std::byte* bytes = access(thread, i, i.d[0], size * i.count,
                            (i.detail2 & kStrong) != 0 ? Use::kStrongWrite : Use::kWrite);
  for (std::uint8_t n = 0; n < i.count; ++n) {
    const auto value = get<std::uint64_t>(thread, i.s[n]);
    std::memcpy(bytes + n * size, &value, size);
  }
  return After::kGoOn;
}

bool read_space(const Opcode& opcode, Instruction& instruction) {
  // Caches and orders among threads change nothing where one thread runs at a time.
  constexpr std::string_view kIgnored[] = {
      "nc",      "ca",      "cg",      "cs",   "lu",  "cv",  "wb",  "wt", "volatile",
      "relaxed", "acquire", "release", "weak", "gpu", "cta", "sys", "v2", "v4"};
  instruction.space = Space::kGeneric;
  for (std::size_t n = 1; n + 1 < opcode.parts.size(); ++n) {
    const std::string& part = opcode.parts[n];
    if (part == "global" || part == "const") {
      instruction.space = Space::kGlobal;
    } else if (part == "shared" || part == "shared::cta") {
      instruction.space = Space::kShared;
    } else if (part == "local") {
      instruction.space = Space::kLocal;
    } else if (part == "param") {
      instruction.space = Space::kParam;
    } else if (!part.starts_with("L1::") && !part.starts_with("L2::") &&
               std::find(std::begin(kIgnored), std::end(kIgnored), part) == std::end(kIgnored)) {
      return false;
    }
  }
  return true;
}

Handler move_handler(const Opcode& opcode, Instruction& instruction) {
  if (opcode.parts.size() != 2) return nullptr;
  if (instruction.count == 1) return &move;
  const std::uint32_t bits = 8 * size_of_type(opcode.type());
  instruction.detail = static_cast<std::uint8_t>(bits / instruction.count);
  // A vector on the left has more destinations; decode() counts them.
  return instruction.d[1].reg >= 0 || instruction.detail2 != 0 ? &unpack : &pack;
}

}  // namespace

std::byte* access(Thread& thread, const Instruction& i, const Operand& base,
                  std::uint32_t size_bytes, Use use) {
  std::uint64_t address = get<std::uint64_t>(thread, base);
  Space space = i.space;
  // 32-bit registers hold offsets in shared, local and parameter memory.
  if (space == Space::kShared || space == Space::kLocal || space == Space::kParam) {
    address = static_cast<std::uint32_t>(address + static_cast<std::uint64_t>(i.offset));
  } else {
    address += static_cast<std::uint64_t>(i.offset);
    if (space == Space::kGeneric) {
      space = static_cast<Space>(std::min<std::uint64_t>(address >> kSpaceShift, 5));
      if (space == Space::kGeneric) space = Space::kGlobal;
      if (space != Space::kGlobal) address &= (std::uint64_t{1} << kSpaceShift) - 1;
    }
  }
  Block& block = *thread.block;
  const bool writes = use == Use::kWrite || use == Use::kStrongWrite || use == Use::kUpdate;
  switch (space) {
    case Space::kGlobal: return global(block.global, address, size_bytes, use);
    case Space::kShared:
      if (use == Use::kUpdate) return block.shared.update(address, size_bytes, thread.accessor());
      if (writes) return block.shared.write(address, size_bytes, thread.accessor());
      return const_cast<std::byte*>(block.shared.read(address, size_bytes, thread.accessor()));
    case Space::kLocal:
      if (address + size_bytes <= block.kernel.local_bytes && address % size_bytes == 0) {
        return block.local.data() + thread.index * block.kernel.local_bytes + address;
      }
      break;
    case Space::kParam:
      if (!writes && address + size_bytes <= block.parameters.size()) {
        return const_cast<std::byte*>(block.parameters.data()) + address;
      }
      break;
    default: break;
  }
  throw Fault(cudaErrorIllegalAddress,
              fmt::format("{} bytes at {:#x} of a thread's own memory or of no space", size_bytes,
                          address));
}

Handler memory_handler(const Opcode& opcode, Instruction& instruction) {
  if (opcode.base() == "mov") return move_handler(opcode, instruction);
  const bool loads = opcode.base() == "ld" || opcode.base() == "ldu";
  if (!loads && opcode.base() != "st") return nullptr;
  if (!read_space(opcode, instruction)) return nullptr;
  instruction.detail = static_cast<std::uint8_t>(size_of_type(opcode.type()));
  const bool ordered = opcode.has("relaxed") || opcode.has("acquire") || opcode.has("release");
  const bool strong = opcode.has("volatile") || (ordered && !opcode.has("cta"));
  instruction.detail2 = static_cast<std::uint8_t>((opcode.type().starts_with('s') ? kSigned : 0) |
                                                  (strong ? kStrong : 0));
  return loads ? &load : &store;
}

}  // namespace ziggurat::cuda_double::ptx
