// SPDX-License-Identifier: Apache-2.0
// tiers/store/striping.cc: assigns each item to the stripe with the least weighted load, in whole
// numbers.
#include "tiers/store/striping.h"

#include <fmt/format.h>

#include "base/error.h"

namespace ziggurat {

std::vector<std::uint32_t> assign_stripes(std::span<const std::uint64_t> item_bytes,
                                          std::span<const StripePlace> places) {
  if (places.empty() || places.size() > kStripesMax)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} directories were given, but a store can be striped over 1 to {}",
                            places.size(), kStripesMax));
  for (const StripePlace& place : places) {
    if (place.weight == 0)
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("the stripe in {} has weight 0; leave it out", place.directory));
  }
  // Products of bytes and bandwidths can exceed 64 bits.
  __extension__ using Wide = unsigned __int128;
  std::vector<std::uint64_t> bytes(places.size());
  std::vector<std::uint32_t> stripes;
  stripes.reserve(item_bytes.size());
  for (const std::uint64_t size_bytes : item_bytes) {
    std::uint32_t best = 0;
    for (std::uint32_t i = 1; i < places.size(); ++i) {
      const Wide here = Wide{bytes[i] + size_bytes} * places[best].weight;
      const Wide there = Wide{bytes[best] + size_bytes} * places[i].weight;
      if (here < there) best = i;
    }
    bytes[best] += size_bytes;
    stripes.push_back(best);
  }
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (bytes[i] == 0 && places.size() > 1)
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("{} gets none of {} chunks over {} directories (its weight is "
                      "{}); leave it out",
                      places[i].directory, item_bytes.size(), places.size(), places[i].weight));
  }
  return stripes;
}

std::string foreign_stripe(const std::string& place, std::size_t chunk, std::size_t chunks) {
  const std::string why =
      chunk < chunks ? fmt::format("chunk {} is in another stripe too", chunk)
                     : fmt::format("it has chunk {}, but all stripes together have only {} chunks",
                                   chunk, chunks);
  return fmt::format(
      "{}: {}, so the stripes are not of one store; give the directories of one store", place, why);
}

}  // namespace ziggurat
