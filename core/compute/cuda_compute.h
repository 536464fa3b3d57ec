// SPDX-License-Identifier: Apache-2.0
// core/compute/cuda_compute.h: Compute by kernels on a GPU. A build without CUDA has the same
// function (cuda_compute_absent.cc).
//
// All operations are queued on one stream of the Compute's own and run in its order, beside the
// copy streams: what one of them waits for (after()), those behind it wait for too. One that
// returns no event has finished when the host knows it.
#pragma once

#include <cstdint>
#include <memory>

#include "core/compute/compute.h"
#include "tiers/cuda_device.h"

namespace ziggurat {

/// `count_max`: elements of the longest span that is rounded; it takes 8 bytes of the device's
/// memory for each of their tiles, and some KiB. Host memory of results (Rounding::squares) is
/// registered with the device. Both must outlive it.
/// Errors: kResourceExhausted, kUnavailable; kUnimplemented in a build without CUDA.
std::unique_ptr<Compute> make_cuda_compute(CudaDevice& device, Reactor& reactor,
                                           std::uint64_t count_max);

}  // namespace ziggurat
