// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/c_stash_test.cc: a stash through the C interface.
#include <gmock/gmock.h>

#include <cstring>
#include <string>
#include <vector>

#include "integrations/c/ziggurat.h"
#include "tests/support/scratch_directory.h"

namespace ziggurat {
namespace c_stash_test {

using ::testing::HasSubstr;

class CStash : public ::testing::Test {
 protected:
  CStash() { EXPECT_EQ(ziggurat_runtime_create("{\"threads\": 1}", &runtime_), ZIGGURAT_OK); }
  ~CStash() override {
    if (stash_ != 0) {
      EXPECT_EQ(ziggurat_stash_close(stash_), ZIGGURAT_OK);
    }
    EXPECT_EQ(ziggurat_runtime_destroy(runtime_), ZIGGURAT_OK);
  }
  ziggurat_status open(const std::string& settings) {
    return ziggurat_stash_open(runtime_, settings.c_str(), &stash_);
  }
  std::string settings() const {
    return R"({"store": ")" + folder_.path() + R"(", "memory": "1MiB"})";
  }

  testing::ScratchDirectory folder_;
  ziggurat_runtime runtime_ = 0;
  ziggurat_stash stash_ = 0;
};

TEST_F(CStash, GivesBackWhatWasPutAndCountsIt) {
  ASSERT_EQ(open(settings()), ZIGGURAT_OK) << ziggurat_last_error();
  constexpr std::uint64_t kItems = 40, kBytes = 100'000;
  std::vector<uint64_t> tickets(kItems);
  for (std::uint64_t i = 0; i < kItems; ++i) {
    const std::string item(kBytes, static_cast<char>('a' + i % 26));
    ASSERT_EQ(ziggurat_stash_put(stash_, item.data(), item.size(), &tickets[i]), ZIGGURAT_OK);
  }
  for (std::uint64_t i = kItems; i-- > 0;) {
    std::string found(kBytes, ' ');
    ASSERT_EQ(ziggurat_stash_read(stash_, tickets[i], found.data(), 0, kBytes), ZIGGURAT_OK);
    EXPECT_EQ(found, std::string(kBytes, static_cast<char>('a' + i % 26)));
    EXPECT_EQ(ziggurat_stash_drop(stash_, tickets[i]), ZIGGURAT_OK);
  }
  ziggurat_stash_state figures = ZIGGURAT_INIT(ziggurat_stash_state);
  ASSERT_EQ(ziggurat_stash_figures(stash_, &figures), ZIGGURAT_OK);
  EXPECT_EQ(figures.put_bytes, kItems * kBytes);
  EXPECT_GT(figures.written_bytes, 0U);
  EXPECT_GT(figures.read_bytes, 0U);
  EXPECT_LE(figures.memory_peak_bytes, 1U << 20);
}

TEST_F(CStash, ReadsAPart) {
  ASSERT_EQ(open(settings()), ZIGGURAT_OK);
  uint64_t ticket = 0;
  ASSERT_EQ(ziggurat_stash_put(stash_, "activation", 10, &ticket), ZIGGURAT_OK);
  std::string found = "...";
  EXPECT_EQ(ziggurat_stash_read(stash_, ticket, found.data(), 2, 3), ZIGGURAT_OK);
  EXPECT_EQ(found, "tiv");
  EXPECT_EQ(ziggurat_stash_read(stash_, ticket, nullptr, 10, 0), ZIGGURAT_OK);
  EXPECT_EQ(ziggurat_stash_read(stash_, ticket, found.data(), 8, 3), ZIGGURAT_INVALID_ARGUMENT);
  EXPECT_THAT(ziggurat_last_error(), HasSubstr("has 10 bytes"));
  EXPECT_EQ(ziggurat_stash_read(stash_, ticket, nullptr, 0, 3), ZIGGURAT_INVALID_ARGUMENT);
}

TEST_F(CStash, LendsWhatTheCallerFilled) {
  ASSERT_EQ(open(settings()), ZIGGURAT_OK);
  uint64_t ticket = 0, loan = 0;
  void* address = nullptr;
  ASSERT_EQ(ziggurat_stash_take(stash_, 10, &ticket, &address), ZIGGURAT_OK);
  std::memcpy(address, "activation", 10);
  ASSERT_EQ(ziggurat_stash_filled(stash_, ticket), ZIGGURAT_OK);
  ASSERT_EQ(ziggurat_stash_lend(stash_, ticket, &loan, &address), ZIGGURAT_OK);
  EXPECT_EQ(std::string(static_cast<const char*>(address), 10), "activation");
  uint64_t large = 0, none = 1;
  EXPECT_EQ(ziggurat_stash_take(stash_, 1 << 20, &large, &address), ZIGGURAT_OK);
  EXPECT_EQ(large, 0U);
  EXPECT_EQ(address, nullptr);
  EXPECT_EQ(ziggurat_stash_give_back(stash_, loan), ZIGGURAT_OK);
  ASSERT_EQ(ziggurat_stash_take(stash_, 1 << 20, &large, &address), ZIGGURAT_OK);
  EXPECT_EQ(ziggurat_stash_filled(stash_, large), ZIGGURAT_OK);
  EXPECT_EQ(ziggurat_stash_lend(stash_, large, &none, &address), ZIGGURAT_OK);
  EXPECT_EQ(none, 0U);  // more than half of the memory
  EXPECT_EQ(address, nullptr);
  EXPECT_EQ(ziggurat_stash_take(stash_, 0, &large, &address), ZIGGURAT_INVALID_ARGUMENT);
  EXPECT_EQ(ziggurat_stash_take(stash_, 8, nullptr, &address), ZIGGURAT_INVALID_ARGUMENT);
  EXPECT_EQ(ziggurat_stash_lend(stash_, 99, &loan, &address), ZIGGURAT_INVALID_ARGUMENT);
  EXPECT_THAT(ziggurat_last_error(), HasSubstr("no item 99"));
}

TEST_F(CStash, NamesWhatIsWrong) {
  EXPECT_EQ(open("{\"memory\": \"1MiB\"}"), ZIGGURAT_INVALID_ARGUMENT);
  EXPECT_THAT(ziggurat_last_error(), HasSubstr("\"store\" is missing"));
  EXPECT_EQ(open(R"({"store": "/tmp"})"), ZIGGURAT_INVALID_ARGUMENT);
  EXPECT_THAT(ziggurat_last_error(), HasSubstr("\"memory\" is missing"));
  ASSERT_EQ(open(settings()), ZIGGURAT_OK);
  uint64_t ticket = 0;
  EXPECT_EQ(ziggurat_stash_put(stash_, nullptr, 8, &ticket), ZIGGURAT_INVALID_ARGUMENT);
  EXPECT_EQ(ziggurat_stash_put(stash_, "", 0, &ticket), ZIGGURAT_INVALID_ARGUMENT);
  char byte = 0;
  EXPECT_EQ(ziggurat_stash_read(stash_, 7, &byte, 0, 1), ZIGGURAT_INVALID_ARGUMENT);
  EXPECT_THAT(ziggurat_last_error(), HasSubstr("item 7"));
  EXPECT_EQ(ziggurat_stash_drop(stash_, 7), ZIGGURAT_OK);
  EXPECT_EQ(ziggurat_stash_close(stash_ + 1), ZIGGURAT_INVALID_ARGUMENT);
}

TEST_F(CStash, KeepsItsRuntime) {
  ASSERT_EQ(open(settings()), ZIGGURAT_OK);
  EXPECT_EQ(ziggurat_runtime_destroy(runtime_), ZIGGURAT_INVALID_ARGUMENT);
}

}  // namespace c_stash_test
}  // namespace ziggurat
