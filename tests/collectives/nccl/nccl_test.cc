// SPDX-License-Identifier: Apache-2.0
// tests/collectives/nccl/nccl_test.cc: NCCL where it is, where it is not, and where it has no GPU.
// The rest is in nccl_ranks_test.cc and communicator_conformance_test.cc, over a double.
#include <gmock/gmock.h>

#include "base/error.h"
#include "collectives/nccl/nccl_device.h"
#include "collectives/shared_library.h"
#include "tiers/device/cuda_device.h"

namespace ziggurat {
namespace nccl_test {

using ::testing::HasSubstr;

std::string refusal() {
  try {
    open_nccl({.timeout = std::chrono::seconds(1)});
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

TEST(Nccl, IsFoundWithItsVersionAndPlaceOrTheReasonIsGiven) {
  const NcclInventory inventory = nccl_inventory();
  EXPECT_NE(inventory.found.empty(), inventory.why_none.empty());
  if (!inventory.found.empty()) {
    EXPECT_THAT(inventory.found, ::testing::ContainsRegex("2\\.[0-9]+\\.[0-9]+, .*libnccl"));
  } else {
    EXPECT_THAT(inventory.why_none, HasSubstr("`collectives=auto`"));
  }
}

TEST(Nccl, WithoutAGpuNamesTheLibraryTheDriverAndWhatToDo) {
  const NcclInventory inventory = nccl_inventory();
  if (inventory.found.empty()) GTEST_SKIP() << "no NCCL here: " << inventory.why_none;
  if (!cuda_devices().gpus.empty()) GTEST_SKIP() << "there is a GPU here";
  EXPECT_THAT(refusal(), HasSubstr("libnccl"));
  EXPECT_THAT(refusal(), HasSubstr("driver"));
  EXPECT_THAT(refusal(), HasSubstr("`collectives=auto`"));
}

TEST(Nccl, WithoutTheLibrarySaysWhatTheLoaderSaidAndWhatToDo) {
  if (!nccl_inventory().found.empty()) GTEST_SKIP() << "NCCL is here";
  EXPECT_THAT(refusal(), HasSubstr("`collectives=auto`"));
}

TEST(SharedLibrary, ThatIsNowhereIsRefusedWithEveryPlaceThatWasTried) {
  try {
    SharedLibrary::open({"/nowhere/libone.so", "libtwo.so"}, "install it");
    FAIL() << "opened";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
    EXPECT_THAT(error.what(), HasSubstr("/nowhere/libone.so"));
    EXPECT_THAT(error.what(), HasSubstr("libtwo.so"));
    EXPECT_THAT(error.what(), HasSubstr("install it"));
  }
}

}  // namespace nccl_test
}  // namespace ziggurat
