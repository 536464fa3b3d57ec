// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/memory_access.h: the bytes behind an address, whatever its space.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tests/cuda_double/ptx/thread.h"

namespace ziggurat::cuda_double::ptx {

/// kUpdate is atomic. A strong access is volatile, relaxed or stronger, at the device's scope.
enum class Use : std::uint8_t { kRead, kWrite, kUpdate, kStrongRead, kStrongWrite };

/// Errors: Fault, if the thread may not do that there.
std::byte* access(Thread& thread, const Instruction& instruction, const Operand& base,
                  std::uint32_t size_bytes, Use use);

}  // namespace ziggurat::cuda_double::ptx
