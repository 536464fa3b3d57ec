// SPDX-License-Identifier: Apache-2.0
// tiers/striping.h: several drives of different speeds as one: which drive each chunk lives on.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "aio/direct_file.h"
#include "aio/io_engine.h"

namespace ziggurat {

inline constexpr std::uint32_t kStripesMax = 16;

/// One directory of a striped set. What it points to outlives the files in it.
struct StripePlace {
  IoEngine& io;
  IoObservers observers;
  std::string directory;
  std::uint64_t weight = 1;  ///< share of the bytes, in any unit: the drive's bandwidth
};

/// For each item the index of its stripe: in order of need, each goes where the bytes so far, for
/// the weight, are fewest. So any stretch of consecutive items is spread like the whole, and all
/// drives end a sweep together. Depends on nothing but its arguments.
/// Errors: kInvalidArgument if a weight is 0, if there are more than kStripesMax, or if a stripe
/// would hold nothing.
std::vector<std::uint32_t> assign_stripes(std::span<const std::uint64_t> item_bytes,
                                          std::span<const StripePlace> places);

}  // namespace ziggurat
