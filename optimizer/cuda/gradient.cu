// SPDX-License-Identifier: Apache-2.0
// optimizer/cuda/gradient.cu: runs a gradient's programs as kernels.
#include "base/numerics/launch_inl.h"
#include "optimizer/cuda/gradient_programs.h"

namespace ziggurat::cuda {

using internal::launch_program;

void launch(const RoundTiles<false>& program, StreamHandle stream) {
  launch_program("round tiles", program, stream);
}

void launch(const RoundTiles<true>& program, StreamHandle stream) {
  launch_program("round a tile in place", program, stream);
}

void launch(const Accumulate& program, StreamHandle stream) {
  launch_program("accumulate", program, stream);
}

void launch(const Widen& program, StreamHandle stream) { launch_program("widen", program, stream); }

void launch(const ScaleTiles& program, StreamHandle stream) {
  launch_program("scale tiles", program, stream);
}

void launch_clear(void* address, std::size_t size_bytes, StreamHandle stream) {
  if (size_bytes == 0) return;
  internal::require_success(
      "cudaMemsetAsync", size_bytes,
      cudaMemsetAsync(address, 0, size_bytes, static_cast<cudaStream_t>(stream)));
}

}  // namespace ziggurat::cuda
