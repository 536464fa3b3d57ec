// SPDX-License-Identifier: Apache-2.0
// tests/optimizer/cuda_twins.cc: takes the place of optimizer/cuda's .cu files at link time: what
// is queued is run at once, by the kernels' host twins.
#include <cstring>

#include "optimizer/cuda/gradient_programs.h"
#include "optimizer/cuda/update_programs.h"
#include "tests/support/twin.h"

namespace ziggurat::cuda {

using testing::run_as_twin;

void launch(const UpdateElements& program, StreamHandle) { run_as_twin(program); }
void launch(const UpdateCodes& program, StreamHandle) { run_as_twin(program); }
void launch(const DecodeBlock& program, StreamHandle) { run_as_twin(program); }
void launch(const EncodeBlock& program, StreamHandle) { run_as_twin(program); }
void launch(const TakeMasters& program, StreamHandle) { run_as_twin(program); }
void launch(const RoundTiles<false>& program, StreamHandle) { run_as_twin(program); }
void launch(const RoundTiles<true>& program, StreamHandle) { run_as_twin(program); }
void launch(const Accumulate& program, StreamHandle) { run_as_twin(program); }
void launch(const Widen& program, StreamHandle) { run_as_twin(program); }
void launch(const ScaleTiles& program, StreamHandle) { run_as_twin(program); }
void launch_clear(void* address, std::size_t size_bytes, StreamHandle) {
  std::memset(address, 0, size_bytes);
}

}  // namespace ziggurat::cuda
