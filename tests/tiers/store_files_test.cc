// SPDX-License-Identifier: Apache-2.0
// tests/tiers/store_files_test.cc: which names are those of a store's files.
#include "tiers/store/store_files.h"

#include <gtest/gtest.h>

#include "tiers/store/state_store.h"

namespace ziggurat {
namespace store_files_test {

TEST(StoreFiles, AreKnownByTheirNames) {
  for (const int rank : {0, 7, 12'345}) {
    for (const std::uint32_t stripe : {0U, 3U, 15U}) {
      const auto finished = store_file_name(StateStore::file_name(rank, stripe));
      ASSERT_TRUE(finished);
      EXPECT_EQ(finished->rank, rank);
      EXPECT_EQ(finished->stripe, stripe);
      EXPECT_FALSE(finished->is_unfinished);
      const auto unfinished = store_file_name(StateStore::temporary_name(rank, stripe));
      ASSERT_TRUE(unfinished);
      EXPECT_EQ(unfinished->rank, rank);
      EXPECT_EQ(unfinished->stripe, stripe);
      EXPECT_TRUE(unfinished->is_unfinished);
    }
  }
}

TEST(StoreFiles, HaveNoOtherNames) {
  for (const char* const name :
       {"", "rank", "rank00000", "rank00000.ziggura", "rank00000.ziggurat.newer", "rank0.ziggurat",
        "rank-0001.ziggurat", "rank00000-stripe00.ziggurat", "rank00000-stripe1.ziggurat",
        "rank00000-stripe.ziggurat", "my-rank00000.ziggurat", "rank00000/rank00000.ziggurat",
        "rank99999999999999999999.ziggurat", "rank notes.ziggurat"}) {
    EXPECT_FALSE(store_file_name(name)) << name;
    EXPECT_FALSE(is_store_file(name)) << name;
  }
  EXPECT_TRUE(is_store_file("rank00012.ziggurat"));
  EXPECT_FALSE(is_store_file("rank00012.ziggurat.new"));
}

}  // namespace store_files_test
}  // namespace ziggurat
