// SPDX-License-Identifier: Apache-2.0
// tests/optimizer/cuda_tile_hash_test.cc: the kernels' hashes against the library's.
#include "optimizer/cuda/tile_hash.h"

#include "base/checksum.h"
#include "base/error.h"
#include "optimizer/xxh3.h"
#include "tests/optimizer/state.h"
#include "tests/support/cuda_memory.h"
#include "tiers/store/record_hash.h"

namespace ziggurat::testing {
namespace {

std::vector<std::byte> random_bytes(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

TEST(CudaTileHash, EverySizeOfPieces) {
  for (std::size_t piece = 256; piece <= kTileBytes; piece += piece < 4096 ? 64 : 12288) {
    constexpr std::size_t kPieces = 3;
    const std::vector<std::byte> bytes = random_bytes(kPieces * piece, 1);
    OnDevice on_device(bytes, 8);
    OnDevice hashes(std::vector<std::uint64_t>(kPieces), 1);
    draw_order(piece);
    cuda::hash_pieces(nullptr, on_device.bytes(), piece, hashes.as<std::uint64_t>());
    std::vector<std::uint64_t> want;
    for (std::size_t i = 0; i < kPieces; ++i)
      want.push_back(hash64(std::span(bytes).subspan(i * piece, piece), 0));
    ASSERT_TRUE(same_bytes(hashes.read(), std::as_bytes(std::span(want)))) << piece;
  }
}

TEST(CudaTileHash, ARecordsPiecesMakeItsHash) {
  for (const StateFormat format : kAllFormats) {
    const RecordFormat shape = record_format(OptimizerKind::kAdamW, format);
    constexpr std::size_t kTiles = 3;
    const std::vector<std::byte> record = random_bytes(shape.record_bytes(kTiles), 2);
    OnDevice on_device(record, 0);
    OnDevice hashes(std::vector<std::uint64_t>(shape.segments().size() * kTiles));
    cuda::hash_record_pieces(nullptr, on_device.bytes(), shape, hashes.as<std::uint64_t>());
    EXPECT_EQ(hash64(hashes.read(), 77), record_hash(record, 77, shape)) << to_string(format);
  }
}

TEST(CudaTileHash, RefusesPiecesThatAreHashedInAnotherWay) {
  OnDevice bytes(random_bytes(1024, 3), 0);
  OnDevice hashes(std::vector<std::uint64_t>(8));
  for (const std::size_t piece : {128u, 192u, 1000u}) {
    const auto some = bytes.bytes().first(1024 / piece * piece);
    EXPECT_THROW(
        cuda::hash_pieces(nullptr, some, piece, hashes.as<std::uint64_t>().first(1024 / piece)),
        Error)
        << piece;
  }
}

/// Keys of stochastic rounding are made of it on every machine.
TEST(CudaTileHash, AWordsHashIsTheLibrarys) {
  std::mt19937_64 random(4);
  for (int i = 0; i < 10000; ++i) {
    const std::uint64_t seed = i % 10 == 0 ? i : random();
    const std::uint64_t value = i % 3 == 0 ? i : random();
    ASSERT_EQ(internal::xxh3::hash_word(seed, value), mix_seed(seed, value))
        << seed << " " << value;
  }
}

}  // namespace
}  // namespace ziggurat::testing
