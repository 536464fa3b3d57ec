// SPDX-License-Identifier: Apache-2.0
// collectives/nccl/nccl_library.cc: where NCCL is looked for, and the errors of its calls.
#include "collectives/nccl/nccl_library.h"

#include <fmt/format.h>

#include "base/error.h"
#include "collectives/nccl/nccl_device.h"

namespace ziggurat {

std::shared_ptr<const NcclLibrary> NcclLibrary::open() {
  return std::shared_ptr<const NcclLibrary>(new NcclLibrary{SharedLibrary::open(
      own_library_names("libnccl.so.2"),
      "install NCCL 2 for this CUDA (the Python wheel nvidia-nccl-cu13 has it; put its "
      "nvidia/nccl/lib into LD_LIBRARY_PATH), or use `collectives=auto`")});
}

std::string NcclLibrary::version() const {
  int code = 0;
  if (ncclGetVersion_(&code) != ncclSuccess) return "of unknown version";
  return fmt::format("{}.{}.{}", code / 10'000, code / 100 % 100, code % 100);
}

void NcclLibrary::check(ncclResult_t result, const char* what) const {
  if (result == ncclSuccess || result == ncclInProgress) return;
  throw Error(ErrorCode::kUnavailable,
              fmt::format("{}: {}; NCCL_DEBUG=WARN says more", what, ncclGetErrorString_(result)),
              static_cast<int>(result));
}

void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw Error(ErrorCode::kUnavailable,
              fmt::format("{}: {} ({})", what, cudaGetErrorString(error), cudaGetErrorName(error)),
              static_cast<int>(error));
}

NcclInventory nccl_inventory() {
  try {
    const auto nccl = NcclLibrary::open();
    return {fmt::format("{}, {}", nccl->version(), nccl->library.path()), {}};
  } catch (const Error& error) {
    return {{}, error.what()};
  }
}

}  // namespace ziggurat
