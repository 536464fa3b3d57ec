// SPDX-License-Identifier: Apache-2.0
// integrations/device_mlp/kernels.h: queues a layer as a kernel (kernels.cu).
#pragma once

#include "base/numerics/kernel_launch.h"
#include "integrations/device_mlp/layers.h"

namespace ziggurat::device_mlp {

void launch(const Each<Embed>& program, StreamHandle stream);
void launch(const Each<Linear>& program, StreamHandle stream);
void launch(const Each<Softmax>& program, StreamHandle stream);
void launch(const Each<LinearGradient>& program, StreamHandle stream);
void launch(const Each<LinearBackward>& program, StreamHandle stream);
void launch(const Each<EmbedGradient>& program, StreamHandle stream);

}  // namespace ziggurat::device_mlp
