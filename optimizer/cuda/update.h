// SPDX-License-Identifier: Apache-2.0
// optimizer/cuda/update.h: optimizer/update.h on a GPU: one optimizer step over a record in device
// memory.
//
// It gives the same bits as update_record for every optimizer, format, type and rounding, also for
// odd counts and runs, because both are compiled from optimizers.h and slice_element.h. Kernels are
// queued, in order, on the caller's stream, and the function does not wait; memory must stay until
// they have run. Errors: kInvalidArgument for an address that is not aligned to its elements,
// kResourceExhausted and kUnavailable from the launch.
#pragma once

#include <cstddef>
#include <span>

#include "base/numerics/kernel_launch.h"
#include "optimizer/eight_bit.h"
#include "optimizer/update.h"

namespace ziggurat::cuda {

/// Size of the memory through which blocks of 8-bit codes that belong to two runs are updated, one
/// block after the other.
inline constexpr std::size_t kUpdateScratchBytes = 2 * kEightBitBlock * sizeof(float);

/// Updates a record; every span is memory of the device. Queues one kernel per run, so callers
/// should put elements of one group and decay side by side. Each block of codes that runs share
/// needs three more kernels, and only these blocks use `scratch` (kUpdateScratchBytes, used by no
/// other stream; may be empty in every format without codes). Takes no
/// hash.
void update_record(StreamHandle stream, StepView steps, const RecordView& view,
                   std::span<const DecayRun> runs, std::span<std::byte> scratch);

}  // namespace ziggurat::cuda
