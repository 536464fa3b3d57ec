// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/optimizer_twins.h: the host twins of the optimizer's kernels, for the double.
#pragma once

namespace ziggurat::cuda_double {

/// From here on run_programs() may choose them.
void add_optimizer_twins();

}  // namespace ziggurat::cuda_double
