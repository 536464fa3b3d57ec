// SPDX-License-Identifier: Apache-2.0
// optimizer/cuda/update.h: optimizer/update.h on a GPU: one optimizer step over a record that lies
// in device memory.
//
// The same bits as update_record for every optimizer, format, type and rounding, odd counts and
// runs included: both are compiled from rules.h and slice_element.h. Kernels are queued, in order,
// on the caller's stream and nothing waits; memory must stay until they have run. Errors:
// kInvalidArgument for an address that is not aligned to its elements, kResourceExhausted and
// kUnavailable from the launch.
#pragma once

#include <cstddef>
#include <span>

#include "base/numerics/kernel_launch.h"
#include "optimizer/eight_bit.h"
#include "optimizer/update.h"

namespace ziggurat::cuda {

/// What the blocks of 8-bit codes that lie in two runs go through, one after the other.
inline constexpr std::size_t kUpdateScratchBytes = 2 * kEightBitBlock * sizeof(float);

/// Every span is memory of the device. One kernel a run, so callers put elements of one group and
/// decay side by side; three more for each block of codes that runs share, and those alone use
/// `scratch` (kUpdateScratchBytes, of no other stream's; may be empty in every format but k8Bit).
/// No hash is taken: see tile_hash.h.
void update_record(StreamHandle stream, StepView steps, const RecordView& view,
                   std::span<const DecayRun> runs, std::span<std::byte> scratch);

}  // namespace ziggurat::cuda
