// SPDX-License-Identifier: Apache-2.0
// optimizer/formats_simd.cc: updates in every format whose moments are not codes.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimizer/formats_simd.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep; includes this file once for each target
#include <hwy/highway.h>

#include <utility>

#include "base/numerics/simd_target.h"
#include "optimizer/kernels.h"
#include "optimizer/update_inl.h"

HWY_BEFORE_NAMESPACE();
namespace ziggurat::internal::HWY_NAMESPACE {

#if ZIGGURAT_HAVE_VECTORS

template <StateFormat kFormat, class Order>
void update_in_order(const OptimizerStep& step, const Slice& slice) {
  using MastersIn = Masters<masters_of(kFormat), Order>;
  using MomentsIn = Moments<moments_of(kFormat), Order>;
  update_arrays<MastersIn, MomentsIn, Order>(step, slice);
}

/// Updates the slice if it is in this format. Where all arrays are in bf16, registers may hold
/// their elements in another order, which saves shuffles.
template <StateFormat kFormat>
bool update_in(const OptimizerStep& step, const Slice& slice) {
  if constexpr (!has_codes(kFormat)) {
    if (slice.format != kFormat) return false;
    if constexpr (rounds_masters(kFormat) && rounds_moments(kFormat)) {
      const bool all = slice.grad_dtype == DType::kBFloat16 &&
                       (slice.param == nullptr || slice.param_dtype == DType::kBFloat16);
      if (all) {
        update_in_order<kFormat, EvenOdd>(step, slice);
        return true;
      }
    }
    update_in_order<kFormat, InOrder>(step, slice);
    return true;
  }
  return false;
}

void update_elements_simd(const OptimizerStep& step, const Slice& slice) {
  [&]<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
    static_cast<void>((update_in<static_cast<StateFormat>(kIndex)>(step, slice) || ...));
  }(std::make_index_sequence<kStateFormatCount>());
}

#else

void update_elements_simd(const OptimizerStep& step, const Slice& slice) {
  scalar::update(step, slice);
}

#endif

}  // namespace ziggurat::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ziggurat::internal {

HWY_EXPORT(update_elements_simd);

void update_elements(const OptimizerStep& step, const Slice& slice) {
  select_kernel(scalar::update, HWY_DISPATCH_TABLE(update_elements_simd))(step, slice);
}

}  // namespace ziggurat::internal
#endif
