// SPDX-License-Identifier: Apache-2.0
// core/compute/cuda_compute_absent.cc: replaces cuda_compute.cc in a build without CUDA, which has
// no GPU to compute on.
#include "base/error.h"
#include "core/compute/cuda_compute.h"

namespace ziggurat {

std::unique_ptr<Compute> make_cuda_compute(CudaDevice&, Reactor&, const ComputeLimits&) {
  throw Error(ErrorCode::kUnimplemented,
              "this build has no CUDA: build with ZIGGURAT_WITH_CUDA=ON where nvcc is installed");
}

}  // namespace ziggurat
