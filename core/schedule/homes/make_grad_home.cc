// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes/make_grad_home.cc: chooses the home of gradients. A new one is a header
// beside the others, which is included here, and a line in one of the choices.
#include <memory>
#include <utility>
#include <vector>

#include "core/schedule/homes/grad_home.h"
#include "core/schedule/homes/grads_lent.h"
#include "core/schedule/homes/grads_on_device.h"
#include "core/schedule/homes/grads_on_host.h"
#include "core/schedule/homes/grads_on_nvme.h"

namespace ziggurat {

std::unique_ptr<UnitGradHome> UnitGradHome::create(Context& context,
                                                   std::vector<StripePlace> places,
                                                   AllocateDevice allocate) {
  switch (context.placement.grads) {
    case Tier::kHost: return std::make_unique<HostGradHome>(context);
    case Tier::kNvme: return std::make_unique<NvmeGradHome>(context, std::move(places));
    case Tier::kDevice: return std::make_unique<DeviceGradHome>(context, std::move(allocate));
  }
  __builtin_unreachable();
}

std::unique_ptr<GradHome> GradHome::create_lent(Context& context, GradSums* sums) {
  return std::make_unique<LentGradHome>(context, sums);
}

}  // namespace ziggurat
