// SPDX-License-Identifier: Apache-2.0
// tests/tiers/lease_queue_test.cc: the queue beside a plain list that is searched from its front.
#include "tiers/pool/lease_queue.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <list>
#include <random>
#include <vector>

namespace ziggurat {
namespace lease_queue_test {

using Entry = LeaseQueue::Entry;

/// The specification: sorted by need, then by arrival.
class PlainList {
 public:
  void insert(Entry* entry) {
    const auto later = std::ranges::find_if(
        entries_, [&](const Entry* other) { return entry->need < other->need; });
    entries_.insert(later, entry);
  }
  void erase(Entry* entry) { entries_.remove(entry); }
  Entry* soonest(RegionSet claimed) const {
    const auto found = std::ranges::find_if(
        entries_, [&](const Entry* entry) { return (entry->regions & ~claimed) != 0; });
    return found == entries_.end() ? nullptr : *found;
  }
  RegionSet claims(const Need& need) const {
    RegionSet claimed = 0;
    for (const Entry* entry : entries_) {
      if (need < entry->need) break;
      claimed |= entry->regions;
    }
    return claimed;
  }
  const std::list<Entry*>& in_order() const { return entries_; }

 private:
  std::list<Entry*> entries_;
};

TEST(LeaseQueue, does_what_a_list_does) {
  for (unsigned seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const auto need = [&] { return Need{random() % 2, random() % 10}; };
    std::vector<Entry> entries(60);
    LeaseQueue queue;
    PlainList list;
    for (int step = 0; step < 400; ++step) {
      Entry& entry = entries[random() % entries.size()];
      const bool waits = std::ranges::count(list.in_order(), &entry) > 0;
      if (waits || random() % 4 == 0) {
        queue.erase(entry);  // also of one that is not there
        list.erase(&entry);
      } else {
        entry = {.regions = 1 + random() % 15, .need = need()};
        queue.insert(entry);
        list.insert(&entry);
      }
      for (RegionSet claimed = 0; claimed < 16; ++claimed)
        ASSERT_EQ(queue.soonest(claimed), list.soonest(claimed));
      const Need asked = need();
      ASSERT_EQ(queue.claims(asked), list.claims(asked));
      ASSERT_THAT(queue.in_order(), ::testing::ElementsAreArray(list.in_order()));
      ASSERT_EQ(queue.size(), list.in_order().size());
    }
  }
}

TEST(LeaseQueue, looks_only_at_the_heads_of_its_lines) {
  LeaseQueue queue;
  std::vector<Entry> entries(1000);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    entries[i] = {.regions = 1 + i % 3, .need = {0, i}};
    queue.insert(entries[i]);
  }
  EXPECT_EQ(queue.soonest(0), &entries[0]);
  EXPECT_EQ(queue.soonest(1), &entries[1]);
  EXPECT_EQ(queue.looked_at(), 3u + 2u) << "three sets of regions, then two with one outside";
}

}  // namespace lease_queue_test
}  // namespace ziggurat
