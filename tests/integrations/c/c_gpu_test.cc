// SPDX-License-Identifier: Apache-2.0
// tests/integrations/c/c_gpu_test.cc: parameters that the engine brings to a GPU, behind the C
// interface, over the double of the CUDA runtime: the caller's streams, and its memory of the GPU.
#include <cuda_runtime_api.h>

#include "tests/cuda_double/cuda_double.h"
#include "tests/integrations/c/embedder.h"

namespace ziggurat::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// Each parameter has a unit of its own.
class CGpu : public Embedder {
 protected:
  static constexpr std::size_t kLentBytes = 512 * 1024;

  void SetUp() override {
    cuda_double::reset(17);
    Embedder::SetUp();
    ASSERT_EQ(cudaMalloc(&memory_, kLentBytes), cudaSuccess);
    ASSERT_EQ(cudaHostAlloc(&pinned_, kLentBytes, cudaHostAllocDefault), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  void TearDown() override {
    close();
    if (device_ != 0) {
      EXPECT_EQ(ziggurat_device_close(device_), ZIGGURAT_OK) << ziggurat_last_error();
    }
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    EXPECT_EQ(cudaFreeHost(pinned_), cudaSuccess);
    EXPECT_EQ(cudaFree(memory_), cudaSuccess);
    Embedder::TearDown();
    EXPECT_THAT(cuda_double::report(), IsEmpty());
  }
  void open_device(void* address, std::uint64_t size_bytes = kLentBytes) {
    ziggurat_device_memory memory = ZIGGURAT_INIT(ziggurat_device_memory);
    memory.kind = ZIGGURAT_CUDA_MEMORY;
    memory.address = address;
    memory.size_bytes = size_bytes;
    ASSERT_DONE(ziggurat_device_open(runtime_, &memory, &device_));
  }
  std::string on_gpu(const char* params) const {
    return std::string(R"({"placement": "params=)") + params + R"(,optimizer=host", "device": )" +
           std::to_string(device_) + "}";
  }
  /// What the parameters are after three steps in memory of the caller's.
  std::array<TypedArray, kParams> of_a_twin() {
    EXPECT_EQ(open(R"({"placement": "optimizer=host"})"), ZIGGURAT_OK) << ziggurat_last_error();
    make_steps();
    std::array<TypedArray, kParams> lent{updated(0), updated(1)};
    close();
    return lent;
  }
  void make_steps() {
    for (std::uint64_t s = 1; s <= 3; ++s) {
      lend_both(s);
      ASSERT_DONE(step());
    }
  }
  void stream_both() {
    for (std::size_t p = 0; p < kParams; ++p) {
      set_values(p, initial(p, DType::kFloat32));
      params_[p].values.address = nullptr;
      params_[p].unit = static_cast<std::uint32_t>(p);
    }
  }
  /// Writes with work on a stream, which has ended when the engine is told.
  void write_on_gpu(std::size_t param, cudaStream_t on) {
    const auto unit = static_cast<std::uint32_t>(param);
    ASSERT_DONE(ziggurat_acquire(engine_, unit, on));
    ziggurat_memory place = ZIGGURAT_INIT(ziggurat_memory);
    ASSERT_DONE(ziggurat_param_memory(engine_, param, &place));
    std::memcpy(pinned_, values_[param].bytes.data(), place.size_bytes);
    ASSERT_EQ(cudaMemcpyAsync(place.address, pinned_, place.size_bytes, cudaMemcpyHostToDevice, on),
              cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(on), cudaSuccess);
    ASSERT_DONE(ziggurat_param_written(engine_, param));
    ASSERT_DONE(ziggurat_release(engine_, unit, on));
  }
  /// Reads with work that goes on after the release.
  TypedArray read_on_gpu(std::size_t param, cudaStream_t on) {
    const auto unit = static_cast<std::uint32_t>(param);
    TypedArray values(DType::kFloat32, kCounts[param]);
    ziggurat_memory place = ZIGGURAT_INIT(ziggurat_memory);
    EXPECT_EQ(ziggurat_acquire(engine_, unit, on), ZIGGURAT_OK) << ziggurat_last_error();
    EXPECT_EQ(ziggurat_param_memory(engine_, param, &place), ZIGGURAT_OK);
    EXPECT_EQ(place.size_bytes, values.bytes.size());
    EXPECT_EQ(cudaMemcpyAsync(pinned_, place.address, place.size_bytes, cudaMemcpyDeviceToHost, on),
              cudaSuccess);
    EXPECT_EQ(ziggurat_release(engine_, unit, on), ZIGGURAT_OK);
    EXPECT_EQ(cudaStreamSynchronize(on), cudaSuccess);
    std::memcpy(values.bytes.data(), pinned_, values.bytes.size());
    return values;
  }

  void* memory_ = nullptr;
  void* pinned_ = nullptr;
  cudaStream_t stream_ = nullptr;
  ziggurat_device device_ = 0;
};

class CGpuBits : public CGpu,
                 public ::testing::WithParamInterface<std::tuple<bool, const char*>> {};

INSTANTIATE_TEST_SUITE_P(Memory, CGpuBits,
                         ::testing::Combine(::testing::Bool(), ::testing::Values("host", "device")),
                         [](const auto& one) {
                           return std::string(std::get<0>(one.param) ? "lent" : "own") +
                                  "_params_" + std::get<1>(one.param);
                         });

TEST_P(CGpuBits, AreThoseOfParametersThatAreLent) {
  const auto& [is_lent, params] = GetParam();
  const std::array<TypedArray, kParams> expected = of_a_twin();
  open_device(is_lent ? memory_ : nullptr);
  stream_both();
  ASSERT_DONE(open(on_gpu(params)));
  const ziggurat_memory first = memory_of(values_[0]);
  ASSERT_DONE(ziggurat_write_param(engine_, 0, &first));
  write_on_gpu(1, stream_);
  make_steps();
  EXPECT_EQ(read_on_gpu(0, nullptr), expected[0]) << "on the default stream";
  EXPECT_EQ(read_on_gpu(1, stream_), expected[1]);
  TypedArray second(DType::kFloat32, kCounts[1]);
  const ziggurat_memory memory = memory_of(second);
  ASSERT_DONE(ziggurat_read_param(engine_, 1, &memory));
  EXPECT_EQ(second, expected[1]);
}

TEST_F(CGpu, AStreamMayBeDestroyedOnceItsEngineIsClosed) {
  open_device(nullptr);
  stream_both();
  cudaStream_t brief = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&brief, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_DONE(open(on_gpu("host")));
  write_on_gpu(0, brief);
  close();
  ASSERT_EQ(cudaStreamDestroy(brief), cudaSuccess);
  ASSERT_DONE(open(on_gpu("host")));
  const ziggurat_memory first = memory_of(values_[0]);
  ASSERT_DONE(ziggurat_write_param(engine_, 0, &first));
}

// Larger than what is copied at once.
TEST_F(CGpu, ALargeParameterIsReadAndWrittenInPieces) {
  open_device(nullptr, 2 << 20);
  const std::int64_t count = 300'001;
  ziggurat_param large = ZIGGURAT_INIT(ziggurat_param);
  large.name = "large";
  large.shape = &count;
  large.dimensions = 1;
  large.values = ZIGGURAT_INIT(ziggurat_memory);
  large.flags = ZIGGURAT_FROZEN;
  const std::string settings =
      R"({"placement": "params=host,optimizer=host", "device": )" + std::to_string(device_) + "}";
  ASSERT_DONE(ziggurat_engine_open(runtime_, &large, 1, settings.c_str(), &engine_));
  TypedArray values(DType::kFloat32, static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.count(); ++i) values.set(i, static_cast<float>(i));
  const ziggurat_memory memory = memory_of(values);
  ASSERT_DONE(ziggurat_write_param(engine_, 0, &memory));
  TypedArray got(DType::kFloat32, values.count());
  const ziggurat_memory read = memory_of(got);
  ASSERT_DONE(ziggurat_read_param(engine_, 0, &read));
  EXPECT_EQ(got, values);
}

TEST_F(CGpu, MemoryThatIsNotTheGpusIsRefused) {
  ziggurat_device_memory memory = ZIGGURAT_INIT(ziggurat_device_memory);
  memory.kind = ZIGGURAT_CUDA_MEMORY;
  memory.address = pinned_;
  memory.size_bytes = kLentBytes;
  EXPECT_REFUSED(ziggurat_device_open(runtime_, &memory, &device_),
                 "lend memory that was allocated on this GPU");
  memory.address = memory_;
  memory.index = 3;
  EXPECT_REFUSED(ziggurat_device_open(runtime_, &memory, &device_), "there is no CUDA device 3");
}

}  // namespace
}  // namespace ziggurat::testing
