// SPDX-License-Identifier: Apache-2.0
// tiers/pool/lease_queue.cc: one ordered line for each set of regions.
#include "tiers/pool/lease_queue.h"

#include <algorithm>

namespace ziggurat {

void LeaseQueue::insert(Entry& entry) {
  entry.arrival = ++arrivals_;
  lines_[entry.regions].insert(&entry);
  ++size_;
}

void LeaseQueue::erase(Entry& entry) {
  const auto line = lines_.find(entry.regions);
  if (line == lines_.end() || line->second.erase(&entry) == 0) return;
  --size_;
}

LeaseQueue::Entry* LeaseQueue::soonest(RegionSet claimed) const {
  Entry* best = nullptr;
  for (const auto& [regions, line] : lines_) {
    if (line.empty() || (regions & ~claimed) == 0) continue;
    ++looked_at_;
    if (best == nullptr || Sooner()(*line.begin(), best)) best = *line.begin();
  }
  return best;
}

RegionSet LeaseQueue::claims(const Need& need) const {
  RegionSet claimed = 0;
  for (const auto& [regions, line] : lines_) {
    if (line.empty()) continue;
    ++looked_at_;
    if (!(need < (*line.begin())->need)) claimed |= regions;
  }
  return claimed;
}

std::vector<LeaseQueue::Entry*> LeaseQueue::in_order() const {
  std::vector<Entry*> entries;
  entries.reserve(size_);
  for (const auto& [regions, line] : lines_)
    entries.insert(entries.end(), line.begin(), line.end());
  std::ranges::sort(entries, Sooner());
  return entries;
}

}  // namespace ziggurat
