// SPDX-License-Identifier: Apache-2.0
// core/schedule/homes/make_param_home.cc: chooses the home of parameters. A new one is a header
// beside the others, which is included here, and a line in one of the choices.
#include <memory>
#include <utility>
#include <vector>

#include "core/schedule/homes/param_home.h"
#include "core/schedule/homes/params_lent.h"
#include "core/schedule/homes/params_on_device.h"
#include "core/schedule/homes/params_on_host.h"
#include "core/schedule/homes/params_on_nvme.h"
#include "core/schedule/homes/params_streamed.h"

namespace ziggurat {

std::unique_ptr<UnitParamHome> UnitParamHome::create(Context& context,
                                                     std::vector<StripePlace> places) {
  switch (context.placement.params) {
    case Tier::kHost: return std::make_unique<HostParamHome>(context);
    case Tier::kNvme: return std::make_unique<NvmeParamHome>(context, std::move(places));
    case Tier::kDevice: return std::make_unique<DeviceParamHome>(context);
  }
  __builtin_unreachable();
}

std::unique_ptr<UnitParamHome> UnitParamHome::create_streamed(Context& context,
                                                              std::vector<StripePlace> places) {
  return std::make_unique<StreamedParamHome>(context, create(context, std::move(places)));
}

std::unique_ptr<ParamHome> ParamHome::create_lent(Context& context) {
  return std::make_unique<LentParamHome>(context);
}

}  // namespace ziggurat
