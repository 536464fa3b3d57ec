// SPDX-License-Identifier: Apache-2.0
// tiers/device/cuda_device_absent.cc: cuda_device.h in a build without CUDA: every function says
// why there is no device.
#include "base/error.h"
#include "tiers/device/cuda_device.h"

namespace ziggurat {
namespace {

constexpr const char* kWhy =
    "this program was built without CUDA (build it where "
    "nvcc is found, or with ZIGGURAT_WITH_CUDA=ON)";

}  // namespace

CudaInventory cuda_devices() {
  CudaInventory inventory;
  inventory.why_none = kWhy;
  return inventory;
}

std::unique_ptr<CudaDevice> CudaDevice::create(Reactor&, const CudaDeviceOptions&) {
  throw Error(ErrorCode::kUnavailable, std::string("no CUDA device: ") + kWhy);
}

}  // namespace ziggurat
