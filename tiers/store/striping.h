// SPDX-License-Identifier: Apache-2.0
// tiers/store/striping.h: uses several drives of different speeds as one: decides on which drive
// each chunk lies.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "aio/direct_file.h"
#include "aio/io_engine.h"

namespace ziggurat {

inline constexpr std::uint32_t kStripesMax = 16;

/// One directory of a striped store. The objects that it points to outlive the files in it.
struct StripePlace {
  IoEngine& io;
  IoObservers observers;
  std::string directory;
  std::uint64_t weight = 1;  ///< weight of its share of the bytes, in any unit: the drive's
                             ///< bandwidth
};

/// Returns the index of the stripe of each item. In the order of need, each item goes to the stripe
/// with the fewest bytes so far for its weight. So any run of consecutive items is spread like the
/// whole, and all drives end a sweep at the same time. The result depends on the arguments only.
/// Errors: kInvalidArgument if a weight is 0, if there are more than kStripesMax, or if a stripe
/// would get no item.
std::vector<std::uint32_t> assign_stripes(std::span<const std::uint64_t> item_bytes,
                                          std::span<const StripePlace> places);

/// Says that the stripe in `place` is not of the same store as the stripes read before it: its
/// chunk `chunk` is in one of them too, or is none of the `chunks` that all of them have together.
std::string foreign_stripe(const std::string& place, std::size_t chunk, std::size_t chunks);

}  // namespace ziggurat
