// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/compared_twins.cc: linked into the test of the optimizer's kernels, so that
// each launch of it compares the host twin with the PTX.
#include "tests/cuda_double/kernels.h"
#include "tests/cuda_double/optimizer_twins.h"

namespace ziggurat::cuda_double {
namespace {

const bool compared = [] {
  add_optimizer_twins();
  run_programs(Programs::kCompared);
  return true;
}();

}  // namespace
}  // namespace ziggurat::cuda_double
