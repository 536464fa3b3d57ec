// SPDX-License-Identifier: Apache-2.0
// optimizer/cuda/update.cu: runs an update's programs as kernels.
#include "base/numerics/launch_inl.h"
#include "optimizer/cuda/update_programs.h"

namespace ziggurat::cuda {

using internal::launch_program;

void launch(const UpdateElements& program, StreamHandle stream) {
  launch_program("update elements", program, stream);
}

void launch(const UpdateCodes& program, StreamHandle stream) {
  launch_program("update 8-bit codes", program, stream);
}

void launch(const DecodeBlock& program, StreamHandle stream) {
  launch_program("decode a block of codes", program, stream);
}

void launch(const EncodeBlock& program, StreamHandle stream) {
  launch_program("encode a block of codes", program, stream);
}

void launch(const TakeMasters& program, StreamHandle stream) {
  launch_program("take masters", program, stream);
}

}  // namespace ziggurat::cuda
