// SPDX-License-Identifier: Apache-2.0
// integrations/c/measured_drives.cc: looks directories up in the machine profile.
#include "integrations/c/measured_drives.h"

#include "base/error.h"

namespace ziggurat {
namespace {

MachineProfile profile() {
  try {
    return read_default_profile().value_or(MachineProfile{});
  } catch (const Error&) {
    return {};
  }
}

double rate_in(const MachineProfile& known, const std::vector<StoreDirectory>& store) {
  const DriveProfile* const drive = store.empty() ? nullptr : known.under(store.front().path);
  return drive == nullptr ? 0 : drive->bytes_per_s();
}

}  // namespace

void take_measured(std::vector<StoreDirectory>& store) {
  const MachineProfile known = profile();
  for (StoreDirectory& directory : store)
    if (const DriveProfile* const drive = known.under(directory.path); drive != nullptr)
      directory.outstanding_bytes = drive->outstanding_bytes();
}

MovingSpeeds measured_speeds(const std::vector<StoreDirectory>& store) {
  const MachineProfile known = profile();
  return MovingSpeeds::of(known, rate_in(known, store));
}

double measured_rate(const std::vector<StoreDirectory>& store) { return rate_in(profile(), store); }

}  // namespace ziggurat
