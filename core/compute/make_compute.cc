// SPDX-License-Identifier: Apache-2.0
// core/compute/make_compute.cc: which Compute a device has.
#include <fmt/format.h>

#include "base/error.h"
#include "core/compute/cpu_compute.h"

namespace ziggurat {

std::unique_ptr<Compute> make_compute(Device& device, Reactor& reactor, WorkerPool& workers) {
  if (device.host_accessible()) return std::make_unique<CpuCompute>(reactor, workers);
  throw Error(ErrorCode::kUnimplemented,
              fmt::format("device '{}': this build has no kernels for it; use the host-emulated "
                          "device",
                          device.description()));
}

}  // namespace ziggurat
