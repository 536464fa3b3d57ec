// SPDX-License-Identifier: Apache-2.0
// optimizer/cuda/tile_hash.cu: hashes pieces with a kernel.
#include "base/numerics/launch_inl.h"
#include "optimizer/cuda/tile_hash_programs.h"

void ziggurat::cuda::launch(const HashPieces& program, StreamHandle stream) {
  internal::launch_program("hash pieces", program, stream);
}
