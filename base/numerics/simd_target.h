// SPDX-License-Identifier: Apache-2.0
// base/numerics/simd_target.h: chooses the instruction set that all our kernels use.
//
// The choice is ours and not Highway's own, which is global to the process: the embedding program
// may use Highway too.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

namespace ziggurat {

/// Returns the instruction set in use ("scalar", "AVX2", "AVX3", ...); simd_targets() returns all
/// that this CPU can run. ZIGGURAT_SIMD=name forces one; it is read once, at first use. An unknown
/// or unsupported name is an Error that lists the valid ones. Call simd_target() at start: kernels
/// cannot throw, so they log the error and use the best target, whose bits are the same.
std::string_view simd_target();
std::vector<std::string_view> simd_targets();
/// For tests: forces a target by name from now on; an empty name returns to the best one. Errors:
/// kInvalidArgument.
void force_simd_target(std::string_view name);

}  // namespace ziggurat

namespace ziggurat::internal {

/// Returns the index into the tables that HWY_EXPORT makes. kSpecificationSlot means the scalar
/// specification. Thread-safe.
inline constexpr std::size_t kSpecificationSlot =
    0;  // Highway keeps that entry for its own first-call hook
std::size_t simd_slot() noexcept;

/// Returns the function in use: `specification`, or the entry of a table made by HWY_EXPORT.
template <class Function, std::size_t kSlots>
Function* select_kernel(Function* specification, Function* const (&table)[kSlots]) noexcept {
  const std::size_t slot = simd_slot();
  if (slot == kSpecificationSlot) return specification;
  return table[kSlots == 1 ? 0
                           : slot];  // one entry: compiled for a single target, without dispatch
}

}  // namespace ziggurat::internal
