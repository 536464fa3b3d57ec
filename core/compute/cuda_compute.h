// SPDX-License-Identifier: Apache-2.0
// core/compute/cuda_compute.h: Compute by kernels on a GPU. A build without CUDA has the same
// function (cuda_compute_absent.cc).
//
// All operations are queued on one stream of the Compute's own and run in its order, beside the
// copy streams: what one of them waits for (after()), those behind it wait for too. One that
// returns no event has finished when the host knows it.
#pragma once

#include <memory>

#include "core/compute/compute.h"
#include "tiers/cuda_device.h"

namespace ziggurat {

/// Takes 8 bytes of the device's memory for each tile of the longest span that is rounded, 260 KiB
/// where gradients are quantized, and some KiB. Host memory of results (Rounding::squares,
/// Quantizing::codes) is registered with the device. Both must outlive it.
/// Errors: kResourceExhausted, kUnavailable; kUnimplemented in a build without CUDA.
std::unique_ptr<Compute> make_cuda_compute(CudaDevice& device, Reactor& reactor,
                                           const ComputeLimits& limits);

}  // namespace ziggurat
