// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/optimizer_twins.cc: the optimizer's block programs run by the CPU in a
// launch's place: each is told which elements of its arrays it may touch, and gets them where the
// CPU can. optimizer_kernels_test compares all of them with their PTX.
#include "tests/cuda_double/optimizer_twins.h"

#include <algorithm>
#include <cstdint>
#include <typeinfo>

#include "optimizer/cuda/gradient_programs.h"
#include "optimizer/cuda/update_programs.h"
#include "tests/cuda_double/kernels.h"
#include "tests/support/twin.h"

namespace ziggurat::cuda_double {
namespace {

using internal::Slice;

/// An array's address on the host, of which elements [begin, begin + count) are there.
template <class T>
T* based(const void* first_on_host, std::size_t begin) {
  const auto address = reinterpret_cast<std::uintptr_t>(first_on_host) - begin * sizeof(T);
  return reinterpret_cast<T*>(address);
}
template <class T>
void read(const TwinLaunch& launch, const T*& array, std::size_t begin, std::size_t count) {
  if (count > 0) array = based<const T>(launch.reads(array + begin, count).data(), begin);
}
template <class T>
void write(const TwinLaunch& launch, T*& array, std::size_t begin, std::size_t count) {
  if (count > 0) array = based<T>(launch.writes(array + begin, count).data(), begin);
}

template <bool kStaged>
void place(const TwinLaunch& launch, cuda::RoundTiles<kStaged>& program) {
  const std::size_t begin = program.first_tile * kTileElements;
  const std::size_t end = std::min(begin + program.tiles * kTileElements, program.count);
  read(launch, program.values, begin * sizeof(float), (end - begin) * sizeof(float));
  const std::size_t size = size_bytes(program.dtype);
  write(launch, program.out, begin * size, (end - begin) * size);
  write(launch, program.tile_sums, program.first_tile, program.tiles);
}
void place(const TwinLaunch& launch, cuda::Accumulate& program) {
  read(launch, program.values, 0, program.count * size_bytes(program.dtype));
  write(launch, program.sums, 0, program.count);
}
void place(const TwinLaunch& launch, cuda::Widen& program) {
  read(launch, program.values, 0, program.count * size_bytes(program.dtype));
  write(launch, program.out, 0, program.count);
}
void place(const TwinLaunch& launch, cuda::ScaleTiles& program) {
  write(launch, program.values, 0, program.count * size_bytes(program.dtype));
  write(launch, program.tile_not_finite, 0, program.blocks());
}

/// What holds masters, of which parameters of the trainer's are `real`.
void place_masters(const TwinLaunch& launch, Slice& slice) {
  if (!holds_param(slice.format)) return write(launch, slice.master, 0, slice.count);
  write(launch, slice.param_record, 0, slice.count);
  if (slice.format == StateFormat::kSplit) write(launch, slice.residual, 0, slice.count);
}
void place(const TwinLaunch& launch, cuda::Stretch& stretch) {
  Slice& slice = stretch.slice;
  const std::size_t real = std::min(stretch.real, slice.count);
  const bool elsewhere = slice.param_in != slice.param_record;
  if (holds_param(slice.format)) read(launch, slice.param_in, 0, elsewhere ? real : slice.count);
  place_masters(launch, slice);
  for (std::size_t k = 0; k < moment_count(stretch.step.kind); ++k) {
    write(launch, slice.moments[k], 0, slice.count * internal::moment_bytes(slice.format));
    if (slice.format == StateFormat::k8Bit)
      write(launch, slice.scales[k], 0, slice.count / kEightBitBlock);
  }
  read(launch, slice.grad, 0, real * size_bytes(slice.grad_dtype));
  if (slice.param != nullptr) write(launch, slice.param, 0, real * size_bytes(slice.param_dtype));
}
void place(const TwinLaunch& launch, cuda::UpdateElements& program) {
  place(launch, program.stretch);
}
void place(const TwinLaunch& launch, cuda::UpdateCodes& program) { place(launch, program.stretch); }
void place(const TwinLaunch& launch, cuda::TakeMasters& program) {
  Slice& slice = program.slice;
  place_masters(launch, slice);
  const std::byte* params = slice.param;
  read(launch, params, 0, std::min(program.real, slice.count) * size_bytes(slice.param_dtype));
  slice.param = const_cast<std::byte*>(params);
}
void place(const TwinLaunch& launch, cuda::DecodeBlock& program) {
  read(launch, program.codes, 0, kEightBitBlock);
  read(launch, program.scale, 0, 1);
  write(launch, program.values, 0, kEightBitBlock);
}
void place(const TwinLaunch& launch, cuda::EncodeBlock& program) {
  read(launch, program.values, 0, kEightBitBlock);
  write(launch, program.codes, 0, kEightBitBlock);
  write(launch, program.scale, 0, 1);
}

template <class Program>
void add() {
  add_program_twin(typeid(Program), [](const TwinLaunch& launch) {
    auto program = launch.parameter<Program>(0);
    place(launch, program);
    testing::run_as_twin(program, launch.seed);
  });
}

}  // namespace

void add_optimizer_twins() {
  add<cuda::RoundTiles<false>>();
  add<cuda::RoundTiles<true>>();
  add<cuda::Accumulate>();
  add<cuda::Widen>();
  add<cuda::ScaleTiles>();
  add<cuda::UpdateElements>();
  add<cuda::UpdateCodes>();
  add<cuda::DecodeBlock>();
  add<cuda::EncodeBlock>();
  add<cuda::TakeMasters>();
}

}  // namespace ziggurat::cuda_double
