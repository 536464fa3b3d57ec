// SPDX-License-Identifier: Apache-2.0
// optimizer/adamw_simd.cc: AdamW over a slice, for every target that Highway compiles.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optimizer/adamw_simd.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep; includes this file once for each target
#include <hwy/highway.h>

#include "optimizer/adamw_inl.h"
#include "optimizer/kernels.h"
#include "optimizer/simd_target.h"

HWY_BEFORE_NAMESPACE();
namespace ziggurat::internal::HWY_NAMESPACE {

#if ZIGGURAT_HAVE_VECTORS
template <bool kPastCache>
void update_slice(const AdamWStep& step_in, const AdamWSlice& slice_in) {
  // Copies whose address nobody has, so that the broadcast constants stay in registers across the
  // stores.
  const AdamWStep step = step_in;
  const AdamWSlice slice = slice_in;
  std::size_t i = 0;
  for (; i + 2 * kLanes <= slice.count; i += 2 * kLanes) {
    const Elements low = updated(step, slice.decay_factor, load(slice, i), load_gradient(slice, i));
    const Elements high = updated(step, slice.decay_factor, load(slice, i + kLanes),
                                  load_gradient(slice, i + kLanes));
    store(low, slice, i);
    store(high, slice, i + kLanes);
    store_params<kPastCache>(low.master, high.master, slice, i);
  }
  scalar::adamw(step, part_of(slice, i, slice.count));
}

void adamw_simd(const AdamWStep& step, const AdamWSlice& slice) {
  if (store_params_past_cache(slice)) {
    update_slice<true>(step, slice);
    hwy::FlushStream();
  } else {
    update_slice<false>(step, slice);
  }
}
#else
void adamw_simd(const AdamWStep& step, const AdamWSlice& slice) { scalar::adamw(step, slice); }
#endif

}  // namespace ziggurat::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ziggurat::internal {

HWY_EXPORT(adamw_simd);

void adamw(const AdamWStep& step, const AdamWSlice& slice) {
  select_kernel(scalar::adamw, HWY_DISPATCH_TABLE(adamw_simd))(step, slice);
}

}  // namespace ziggurat::internal
#endif
