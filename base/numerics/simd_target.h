// SPDX-License-Identifier: Apache-2.0
// base/numerics/simd_target.h: which instruction set the kernels of this folder run at. One choice,
// shared by all of them.
//
// The choice is ours and not Highway's own, which is global to the process: an embedder may use
// Highway too.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

namespace ziggurat {

/// The instruction set in use ("scalar", "AVX2", "AVX3", ...), and all that this CPU can run.
/// ZIGGURAT_SIMD=name forces one (read once, at first use; an unknown or unsupported name is an
/// Error listing the valid ones: call simd_target() at start, for kernels cannot throw; they log it
/// and run at the best target, whose bits are the same).
std::string_view simd_target();
std::vector<std::string_view> simd_targets();
/// For tests: force a target by name from now on; empty name returns to the best. Errors:
/// kInvalidArgument.
void force_simd_target(std::string_view name);

}  // namespace ziggurat

namespace ziggurat::internal {

/// Index into the tables that HWY_EXPORT makes; kSpecificationSlot means the scalar specification.
/// Thread-safe.
inline constexpr std::size_t kSpecificationSlot =
    0;  // Highway keeps that entry for its own first-call hook
std::size_t simd_slot() noexcept;

/// The function in force: `specification`, or the entry of a table made by HWY_EXPORT.
template <class Function, std::size_t kSlots>
Function* select_kernel(Function* specification, Function* const (&table)[kSlots]) noexcept {
  const std::size_t slot = simd_slot();
  if (slot == kSpecificationSlot) return specification;
  return table[kSlots == 1 ? 0
                           : slot];  // one entry: compiled for a single target, without dispatch
}

}  // namespace ziggurat::internal
