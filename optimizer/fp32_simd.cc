// SPDX-License-Identifier: Apache-2.0
// optimizer/fp32_simd.cc: updates of fp32 masters and moments.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimizer/fp32_simd.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep; includes this file once for each target
#include <hwy/highway.h>

#include "base/numerics/simd_target.h"
#include "optimizer/kernels.h"
#include "optimizer/update_inl.h"

HWY_BEFORE_NAMESPACE();
namespace ziggurat::internal::HWY_NAMESPACE {

void update_fp32_simd(const OptimizerStep& step, const Slice& slice) {
  update_arrays<Fp32Masters, Fp32Moments>(step, slice);
}

}  // namespace ziggurat::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ziggurat::internal {

HWY_EXPORT(update_fp32_simd);

void update_fp32(const OptimizerStep& step, const Slice& slice) {
  select_kernel(scalar::update, HWY_DISPATCH_TABLE(update_fp32_simd))(step, slice);
}

}  // namespace ziggurat::internal
#endif
