// SPDX-License-Identifier: Apache-2.0
// collectives/nccl/nccl_device_absent.cc: what a build without NCCL's header says instead.
#include "base/error.h"
#include "collectives/nccl/nccl_device.h"

namespace ziggurat {
namespace {

constexpr const char* kWhy =
    "this program was built without NCCL; build it on a machine with the CUDA toolkit and nccl.h "
    "(scripts/fetch-nccl brings the header), or use `collectives=auto`";

}  // namespace

NcclInventory nccl_inventory() { return {{}, kWhy}; }

std::unique_ptr<NcclDevice> open_nccl(const NcclOptions&) {
  throw Error(ErrorCode::kUnimplemented, kWhy);
}

}  // namespace ziggurat
