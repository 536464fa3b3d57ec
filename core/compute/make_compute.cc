// SPDX-License-Identifier: Apache-2.0
// core/compute/make_compute.cc: chooses the Compute that fits a device.
#include <fmt/format.h>

#include "base/error.h"
#include "core/compute/costed_compute.h"
#include "core/compute/cpu_compute.h"
#include "core/compute/cuda_compute.h"

namespace ziggurat {

std::unique_ptr<Compute> make_compute(Device& device, Reactor& reactor, Workers& workers,
                                      const ComputeLimits& limits) {
  if (device.host_accessible()) return std::make_unique<CpuCompute>(reactor, workers);
  if (auto* const gpu = dynamic_cast<CudaDevice*>(&device))
    return make_cuda_compute(*gpu, reactor, limits);
  if (auto* const twin = dynamic_cast<CostedDevice*>(&device))
    return std::make_unique<CostedCompute>(*twin);
  throw Error(
      ErrorCode::kUnimplemented,
      fmt::format(
          "this build has no kernels for device '{}': use a CUDA GPU or the host-emulated device",
          device.description()));
}

}  // namespace ziggurat
