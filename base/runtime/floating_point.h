// SPDX-License-Identifier: Apache-2.0
// base/runtime/floating_point.h: the floating-point environment in which our threads compute.
//
// A thread inherits the environment of the thread that starts it, and an embedding program may use
// flush-to-zero or another rounding mode: either changes bits.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif defined(__aarch64__)
#include <cstdint>
#endif

namespace ziggurat::internal {

/// Makes the calling thread round to nearest, keep denormals and mask exceptions.
inline void set_floating_point_environment() noexcept {
#if defined(__x86_64__)
  _mm_setcsr(0x1f80);
#elif defined(__aarch64__)
  const std::uint64_t fpcr = 0;
  asm volatile("msr fpcr, %0" : : "r"(fpcr));
#endif
}

}  // namespace ziggurat::internal
