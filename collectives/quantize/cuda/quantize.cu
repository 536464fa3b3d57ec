// SPDX-License-Identifier: Apache-2.0
// collectives/quantize/cuda/quantize.cu: runs the programs of 8- and 4-bit blocks as kernels.
#include "base/numerics/launch_inl.h"
#include "collectives/quantize/cuda/quantize_programs.h"

namespace ziggurat::cuda {

using internal::launch_program;

void launch(const QuantizeBlocks& program, StreamHandle stream) {
  launch_program("quantize", program, stream);
}

void launch(const DequantizeBlocks& program, StreamHandle stream) {
  launch_program("dequantize", program, stream);
}

void launch(const AddDequantized& program, StreamHandle stream) {
  launch_program("add dequantized", program, stream);
}

}  // namespace ziggurat::cuda
