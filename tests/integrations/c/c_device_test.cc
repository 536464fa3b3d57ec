// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/c_device_test.cc: memory of the host that a caller lends for the parameters
// that the engine keeps, behind the C interface. c_gpu_test.cc has that of a GPU.
#include <sys/mman.h>

#include "tests/integrations/c/embedder.h"

namespace ziggurat::testing {
namespace c_device_test {

using ::testing::HasSubstr;

class CDevice : public Embedder {
 protected:
  static constexpr std::size_t kLentBytes = 512 * 1024;

  void SetUp() override {
    Embedder::SetUp();
    memory_ =
        ::mmap(nullptr, kLentBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory_, MAP_FAILED);
    for (std::size_t p = 0; p < kParams; ++p) {
      params_[p].values.address = nullptr;
      params_[p].unit = static_cast<std::uint32_t>(p);
    }
  }
  void TearDown() override {
    close();
    if (device_ != 0) {
      EXPECT_EQ(ziggurat_device_close(device_), ZIGGURAT_OK) << ziggurat_last_error();
    }
    ::munmap(memory_, kLentBytes);
    Embedder::TearDown();
  }
  ziggurat_device_memory lent() const {
    ziggurat_device_memory memory = ZIGGURAT_INIT(ziggurat_device_memory);
    memory.kind = ZIGGURAT_HOST_MEMORY;
    memory.address = memory_;
    memory.size_bytes = kLentBytes;
    return memory;
  }
  void open_device() {
    const ziggurat_device_memory memory = lent();
    ASSERT_DONE(ziggurat_device_open(runtime_, &memory, &device_));
  }
  static std::string on(ziggurat_device device) {
    return R"(, "placement": "params=host,optimizer=host", "device": )" + std::to_string(device);
  }

  void* memory_ = nullptr;
  ziggurat_device device_ = 0;
};

TEST_F(CDevice, ParametersAreBroughtToTheMemoryThatIsLent) {
  open_device();
  ASSERT_DONE(open(settings(on(device_))));
  TypedArray values = initial(1, DType::kFloat32);
  const ziggurat_memory memory = memory_of(values);
  ASSERT_DONE(ziggurat_write_param(engine_, 1, &memory));
  ASSERT_DONE(ziggurat_acquire(engine_, 1, nullptr));
  ziggurat_memory place = ZIGGURAT_INIT(ziggurat_memory);
  ASSERT_DONE(ziggurat_param_memory(engine_, 1, &place));
  const auto begin = reinterpret_cast<std::uintptr_t>(memory_);
  const auto at = reinterpret_cast<std::uintptr_t>(place.address);
  EXPECT_GE(at, begin);
  EXPECT_LE(at + place.size_bytes, begin + kLentBytes);
  EXPECT_EQ(std::memcmp(place.address, values.bytes.data(), values.bytes.size()), 0);
  ASSERT_DONE(ziggurat_release(engine_, 1, nullptr));
}

TEST_F(CDevice, OneEngineHasItAtATime) {
  open_device();
  ASSERT_DONE(open(settings(on(device_))));
  ziggurat_engine other = 0;
  EXPECT_REFUSED(ziggurat_engine_open(runtime_, params_.data(), kParams,
                                      settings(on(device_)).c_str(), &other),
                 "close the other engine first");
  EXPECT_REFUSED(ziggurat_device_close(device_), "close its engine first");
  EXPECT_REFUSED(ziggurat_runtime_destroy(runtime_), "has open engines, devices");
  close();
  ASSERT_DONE(open(settings(on(device_))));
  // One that does not open gives it back.
  close();
  EXPECT_REFUSED(open(settings(on(device_) + R"(, "clip": 1.0)")), "");
  ASSERT_DONE(open(settings(on(device_))));
}

TEST_F(CDevice, WhatCannotBeADeviceIsRefused) {
  ziggurat_device_memory memory = lent();
  memory.kind = 7;
  EXPECT_REFUSED(ziggurat_device_open(runtime_, &memory, &device_),
                 "memory.kind is 7: give ZIGGURAT_HOST_MEMORY or ZIGGURAT_CUDA_MEMORY");
  memory = lent();
  memory.index = 1;
  EXPECT_REFUSED(ziggurat_device_open(runtime_, &memory, &device_), "host memory has none: give 0");
  memory = lent();
  memory.address = static_cast<std::byte*>(memory_) + 64;
  EXPECT_REFUSED(ziggurat_device_open(runtime_, &memory, &device_),
                 "lend memory whose address 4096 divides");
  memory = lent();
  memory.size_bytes = 100;
  EXPECT_REFUSED(ziggurat_device_open(runtime_, &memory, &device_), "give at least 4 KiB");
  EXPECT_REFUSED(ziggurat_device_open(runtime_, nullptr, &device_), "memory is null");
  EXPECT_EQ(device_, 0U);
  EXPECT_REFUSED(ziggurat_device_close(99), "there is no device 99");
}

TEST_F(CDevice, SettingsThatNameNoDeviceOrTwoAreRefused) {
  open_device();
  EXPECT_REFUSED(open(settings(on(99))), "there is no device 99");
  EXPECT_REFUSED(open(settings(R"(, "device": "cuda:0")")),
                 "the value must be a handle of ziggurat_device_open()");
  EXPECT_REFUSED(open(settings(on(device_) + R"(, "device_memory": "1MiB")")),
                 "\"device\" and \"device_memory\" are given: give one of them");
  ziggurat_runtime runtime = 0;
  ASSERT_DONE(ziggurat_runtime_create(R"({"threads": 1})", &runtime));
  ziggurat_engine engine = 0;
  EXPECT_REFUSED(ziggurat_engine_open(runtime, params_.data(), kParams,
                                      settings(on(device_)).c_str(), &engine),
                 "is of another runtime");
  EXPECT_EQ(ziggurat_runtime_destroy(runtime), ZIGGURAT_OK);
  for (std::size_t p = 0; p < kParams; ++p) {
    params_[p].unit = 0;
    set_values(p, initial(p, DType::kFloat32));
  }
  EXPECT_REFUSED(open(settings(on(device_))), "\"device\" is given, but every parameter is in");
}

}  // namespace c_device_test
}  // namespace ziggurat::testing
