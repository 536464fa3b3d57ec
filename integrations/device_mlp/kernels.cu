// SPDX-License-Identifier: Apache-2.0
// integrations/device_mlp/kernels.cu: launches the layers as CUDA kernels.
#include "base/numerics/launch_inl.h"
#include "integrations/device_mlp/kernels.h"

namespace ziggurat::device_mlp {

using internal::launch_program;

void launch(const Each<Embed>& program, StreamHandle stream) {
  launch_program("embed", program, stream);
}
void launch(const Each<Linear>& program, StreamHandle stream) {
  launch_program("linear", program, stream);
}
void launch(const Each<Softmax>& program, StreamHandle stream) {
  launch_program("softmax", program, stream);
}
void launch(const Each<LinearGradient>& program, StreamHandle stream) {
  launch_program("linear gradient", program, stream);
}
void launch(const Each<LinearBackward>& program, StreamHandle stream) {
  launch_program("linear backward", program, stream);
}
void launch(const Each<EmbedGradient>& program, StreamHandle stream) {
  launch_program("embed gradient", program, stream);
}

}  // namespace ziggurat::device_mlp
