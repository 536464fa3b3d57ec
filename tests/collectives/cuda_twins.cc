// SPDX-License-Identifier: Apache-2.0
// tests/collectives/cuda_twins.cc: takes the place of the collectives' .cu files at link time: what
// is queued is run at once, by the kernels' host twins.
#include "collectives/cuda/rank_sum_programs.h"
#include "collectives/quantize/cuda/quantize_programs.h"
#include "tests/support/twin.h"

namespace ziggurat::cuda {

using testing::run_as_twin;

void launch(const SumRanks& program, StreamHandle) { run_as_twin(program); }
void launch(const QuantizeBlocks& program, StreamHandle) { run_as_twin(program); }
void launch(const DequantizeBlocks& program, StreamHandle) { run_as_twin(program); }
void launch(const AddDequantized& program, StreamHandle) { run_as_twin(program); }

}  // namespace ziggurat::cuda
