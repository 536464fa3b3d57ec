// SPDX-License-Identifier: Apache-2.0
// collectives/cuda/rank_sum.cu: runs the sum of ranks as a kernel.
#include "base/numerics/launch_inl.h"
#include "collectives/cuda/rank_sum_programs.h"

void ziggurat::cuda::launch(const SumRanks& program, StreamHandle stream) {
  internal::launch_program("sum ranks", program, stream);
}
