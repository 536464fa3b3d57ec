// SPDX-License-Identifier: Apache-2.0
// integrations/c/measured_drives.h: what the machine profile knows of the drives of an embedder's
// store. A profile that cannot be read counts as none: an embedder did not ask for it.
#pragma once

#include <vector>

#include "core/engine/engine_config.h"
#include "core/plan/auto_choice.h"

namespace ziggurat {

/// Gives each drive as many bytes at once as it was measured to need.
void take_measured(std::vector<StoreDirectory>& store);

/// Returns the measured speeds of the store's first drive and of copies, or else usual ones.
MovingSpeeds measured_speeds(const std::vector<StoreDirectory>& store);
/// Returns the bytes a second, reads and writes together, of the drive of its first directory; 0 if
/// that was not measured.
double measured_rate(const std::vector<StoreDirectory>& store);

}  // namespace ziggurat
