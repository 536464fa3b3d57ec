// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/warps.h: instructions that threads of a warp do together.
#pragma once

#include <cstdint>
#include <span>

#include "tests/cuda_double/ptx/thread.h"

namespace ziggurat::cuda_double::ptx {

/// Which lanes a thread that waits at shfl, vote, redux or bar.warp waits for.
std::uint32_t members_of(const Thread& thread);
/// Does it for all of them. `lanes[n]` is the thread of lane n, null if it is not a member.
/// Errors: Fault, for a source lane that is not a member.
void do_together(std::span<Thread* const, kWarp> lanes);

}  // namespace ziggurat::cuda_double::ptx
