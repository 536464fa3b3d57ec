// SPDX-License-Identifier: Apache-2.0
// tests/tiers/swap_file_roundtrip_test.cc: items come back as written, the file has no name, and a
// wrong byte has an error that says where.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "aio/thread_engine.h"
#include "base/bytes.h"
#include "base/checksum.h"
#include "base/error.h"
#include "tiers/store/swap_file.h"

namespace ziggurat {
namespace swap_file_roundtrip_test {

TEST(SwapFile, ItemsComeBackAndNothingIsLeftBehind) {
  char name[] = "./swap_test_XXXXXX";
  const std::string directory = ::mkdtemp(name);
  Reactor reactor;
  ThreadEngine io(reactor);
  const std::unique_ptr<std::byte, decltype(&std::free)> memory(
      static_cast<std::byte*>(std::aligned_alloc(4096, 2 * kMiB)), &std::free);
  const std::vector<std::uint64_t> sizes{4096, 100 * 1024, 5000};  // the last is padded by its user
  auto swap =
      SwapFile::create(reactor, {{.io = io, .observers = {}, .directory = directory}}, sizes);
  EXPECT_TRUE(std::filesystem::is_empty(directory));

  const auto item = [&](std::size_t i) {
    return std::span(memory.get(), round_up(sizes[i], 4096));
  };
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    std::ranges::fill(item(i), static_cast<std::byte>(i + 1));
    reactor.block_on(swap->write(i, item(i), hash64(item(i), i)));
  }
  for (const std::size_t i : {1, 0, 2}) {
    std::ranges::fill(item(i), std::byte{0});
    reactor.block_on(swap->read(i, item(i)));
    EXPECT_EQ(hash64(item(i), i), swap->expected_hash(i));
  }
  const Error error = swap->corrupt_item(1);
  EXPECT_EQ(error.code(), ErrorCode::kDataLoss);
  EXPECT_THAT(error.what(), ::testing::HasSubstr("item 1"));
  swap.reset();
  std::filesystem::remove_all(directory);
}

}  // namespace swap_file_roundtrip_test
}  // namespace ziggurat
