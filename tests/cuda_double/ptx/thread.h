// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/thread.h: threads and blocks under way, and how handlers reach registers.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "tests/cuda_double/ptx/global_memory.h"
#include "tests/cuda_double/ptx/program.h"
#include "tests/cuda_double/ptx/shared_memory.h"

namespace ziggurat::cuda_double::ptx {

inline constexpr std::uint32_t kWarp = 32;

/// What all threads of a block share.
struct Block {
  const Kernel& kernel;
  GlobalMemory& global;
  SharedMemory shared;
  std::span<const std::byte> parameters;
  std::vector<std::byte> local;  ///< of all threads, one after the other
  std::uint64_t clock = 0;
};

struct Thread {
  enum class State : std::uint8_t { kReady, kInWarp, kAtBarrier, kDone };
  std::uint64_t* registers = nullptr;
  Block* block = nullptr;
  std::uint32_t pc = 0;
  std::uint32_t index = 0;  ///< in its block
  std::uint32_t warp_syncs = 0;
  State state = State::kReady;
  const Instruction* waits_at = nullptr;

  std::uint32_t lane() const noexcept { return index % kWarp; }
  std::uint32_t warp() const noexcept { return index / kWarp; }
  Accessor accessor() const noexcept { return {index, warp_syncs}; }
};

/// The low bytes of a register or value, as a T.
template <class T>
T get(const Thread& thread, const Operand& operand) noexcept {
  const std::uint64_t bits = operand.reg >= 0 ? thread.registers[operand.reg] : operand.value;
  if constexpr (std::is_same_v<T, bool>) {
    return (bits & 1) != 0;
  } else {
    T value;
    std::memcpy(&value, &bits, sizeof(T));  // x86 is little-endian
    return value;
  }
}

template <class T>
void put(Thread& thread, const Operand& operand, T value) noexcept {
  if (operand.reg < 0) return;  // "_"
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  thread.registers[operand.reg] = bits;
}

}  // namespace ziggurat::cuda_double::ptx
