// SPDX-License-Identifier: Apache-2.0
// core/compute/cuda_compute.h: makes the Compute that runs kernels on a GPU. In a build without
// CUDA the same function throws (cuda_compute_absent.cc).
//
// All operations are queued on one stream that belongs to the Compute, apart from the copy streams,
// and run in its order. If an operation waits for an event (after()), all operations queued later
// wait for it too. An operation that returns no event returns only when the host knows that the
// operation has finished.
#pragma once

#include <memory>

#include "core/compute/compute.h"
#include "tiers/device/cuda_device.h"

namespace ziggurat {

/// Allocates in the device's memory 8 bytes for each tile of the longest span that is rounded, 260
/// KiB if gradients are quantized, and some KiB more. Host memory that receives results
/// (Rounding::squares, Quantizing::codes) must be registered with the device. The device and the
/// reactor must outlive the Compute. Errors: kResourceExhausted, kUnavailable; kUnimplemented in a
/// build without CUDA.
std::unique_ptr<Compute> make_cuda_compute(CudaDevice& device, Reactor& reactor,
                                           const ComputeLimits& limits);

}  // namespace ziggurat
