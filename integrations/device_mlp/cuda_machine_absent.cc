// SPDX-License-Identifier: Apache-2.0
// integrations/device_mlp/cuda_machine_absent.cc: refuses to run on a GPU in a build without CUDA.
#include "base/error.h"
#include "integrations/device_mlp/machine.h"

namespace ziggurat::device_mlp {

std::unique_ptr<Machine> make_machine(CudaDevice&, std::uint64_t) {
  throw Error(ErrorCode::kUnimplemented,
              "this build has no CUDA: build with ZIGGURAT_WITH_CUDA=ON where nvcc is installed");
}

}  // namespace ziggurat::device_mlp
