// SPDX-License-Identifier: Apache-2.0
// tests/base/gpu_memory_test.cc: free memory of a GPU, where the management library tells, and
// nothing where it does not.
#include "base/topology/gpu_memory.h"

#include <gtest/gtest.h>

namespace ziggurat {
namespace {

TEST(GpuMemory, is_what_the_management_library_says) {
  for (int round = 0; round < 2; ++round) {  // it is shut down, and starts again
    const GpuMemoryReader reader(MANAGEMENT_LIBRARY);
    EXPECT_EQ(reader.free_bytes("0000:3b:00.0"), 600u);
    EXPECT_FALSE(reader.free_bytes("0000:3c:00.0"));
  }
}

TEST(GpuMemory, is_unknown_without_the_library) {
  EXPECT_FALSE(GpuMemoryReader("libno-such-library.so.1").free_bytes("0000:3b:00.0"));
  EXPECT_FALSE(GpuMemoryReader("libm.so.6").free_bytes("0000:3b:00.0")) << "it lacks the functions";
}

}  // namespace
}  // namespace ziggurat
