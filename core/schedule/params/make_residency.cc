// SPDX-License-Identifier: Apache-2.0
// core/schedule/params/make_residency.cc: chooses the policy of residency. A new one is a header
// beside the others, which is included here, and a line in the choice.
#include <memory>
#include <utility>

#include "core/schedule/params/at_home.h"
#include "core/schedule/params/gathered.h"
#include "core/schedule/params/loaded.h"
#include "core/schedule/params/residency.h"

namespace ziggurat {

std::unique_ptr<Residency> Residency::create(Context& context, UnitParamHome& home,
                                             const ResidencyLimits& limits,
                                             std::unique_ptr<UnitGather> gather) {
  if (gather) return std::make_unique<GatheredResidency>(context, home, limits, std::move(gather));
  if (home.used_at_home()) return std::make_unique<AtHomeResidency>(context, home);
  return create(context, std::make_unique<TableUnits>(context, home), limits);
}

std::unique_ptr<Residency> Residency::create(Context& context, std::unique_ptr<BroughtUnits> units,
                                             const ResidencyLimits& limits) {
  return std::make_unique<LoadedResidency>(context, std::move(units), limits);
}

}  // namespace ziggurat
