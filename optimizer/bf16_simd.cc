// SPDX-License-Identifier: Apache-2.0
// optimizer/bf16_simd.cc: updates of bf16 parameters and bf16 moments.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimizer/bf16_simd.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep; includes this file once for each target
#include <hwy/highway.h>

#include "base/numerics/simd_target.h"
#include "optimizer/kernels.h"
#include "optimizer/update_inl.h"

HWY_BEFORE_NAMESPACE();
namespace ziggurat::internal::HWY_NAMESPACE {

void update_bf16_simd(const OptimizerStep& step, const Slice& slice) {
  const bool all_bf16 = slice.grad_dtype == DType::kBFloat16 &&
                        (slice.param == nullptr || slice.param_dtype == DType::kBFloat16);
  if (all_bf16) {
    update_arrays<Bf16Masters<EvenOdd>, Bf16Moments<EvenOdd>, EvenOdd>(step, slice);
  } else {
    update_arrays<Bf16Masters<InOrder>, Bf16Moments<InOrder>>(step, slice);
  }
}

}  // namespace ziggurat::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ziggurat::internal {

HWY_EXPORT(update_bf16_simd);

void update_bf16(const OptimizerStep& step, const Slice& slice) {
  select_kernel(scalar::update, HWY_DISPATCH_TABLE(update_bf16_simd))(step, slice);
}

}  // namespace ziggurat::internal
#endif
