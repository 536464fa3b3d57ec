// SPDX-License-Identifier: Apache-2.0
// core/plan/strategies/words.h: figures as a person reads them.
//
// Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string>

namespace ziggurat {

/// Returns "7.3 GB", or "85 GB" from ten on; decimal.
std::string whole_gb(double bytes);

/// Returns "131,072".
std::string grouped(std::int64_t count);

/// Returns a count with two digits that matter: "4,600", "54,000".
std::string about(double count);

}  // namespace ziggurat
