// SPDX-License-Identifier: Apache-2.0
// tests/core/checkpoint_writer_test.cc: the files of a checkpoint are the same wherever the arrays
// lie in memory that are given to the writer.
#include "core/checkpoint/checkpoint_writer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "aio/probe.h"
#include "tests/support/scratch_directory.h"

namespace ziggurat {
namespace checkpoint_writer_test {

std::vector<StateTensor> tensors_of_several_types() {
  const auto tensor = [](const char* name, TensorType type, std::vector<std::int64_t> shape) {
    return StateTensor{
        .name = name, .owner = name, .array = "master", .type = type, .shape = std::move(shape)};
  };
  return {tensor("odd", TensorType::kBF16, {5}), tensor("divided", TensorType::kF32, {90, 700}),
          tensor("long", TensorType::kF32, {100'001})};
}

/// The byte at `index` of what `tensor` holds.
std::byte byte_of(std::size_t tensor, std::uint64_t index) {
  return static_cast<std::byte>((index * 31 + index / 251 + tensor * 7) & 0xff);
}

class ArraysForAWriter : public ::testing::Test {
 protected:
  ArraysForAWriter() { reactor_.start(); }

  /// Writes the tensors in runs. Each array lies `beside` bytes after where the writer wants it.
  std::string file_written(const std::string& name, std::uint64_t beside) {
    const std::string folder = directory_.path() + "/" + name;
    std::filesystem::create_directory(folder);
    reactor_.block_on(write(folder, beside));
    std::ifstream file(folder + "/" + plan_.files.front().name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::uint64_t count_of(std::size_t tensor) const { return piece_of(tensor).box.count(); }
  /// Where an element is in the file.
  std::uint64_t offset_of(std::size_t tensor, std::uint64_t element) const {
    return piece_of(tensor).offset_bytes + element * size_bytes(tensors_[tensor].type);
  }

  const std::vector<StateTensor> tensors_ = tensors_of_several_types();
  const ShardPlan plan_ = plan_whole_tensors(tensors_);

 private:
  const StatePiece& piece_of(std::size_t tensor) const {
    return *std::ranges::find(plan_.pieces, tensor, &StatePiece::tensor);
  }
  Task<> write(std::string folder, std::uint64_t beside) {
    const std::unique_ptr<IoEngine> io = choose_io_engine(reactor_, folder);
    Task<std::unique_ptr<CheckpointWriter>> making = CheckpointWriter::create(
        {.reactor = reactor_, .workers = workers_, .io = *io}, folder, plan_, tensors_);
    const std::unique_ptr<CheckpointWriter> writer = co_await std::move(making);
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      const std::uint64_t count = count_of(t);
      for (std::uint64_t first = 0; first < count; first += kRun) {
        const TensorRun run{.first = first, .count = std::min(kRun, count - first), .at = 0};
        co_await write_run(*writer, t, run, beside);
      }
    }
    co_await writer->finish();
    writer->keep();
  }
  Task<> write_run(CheckpointWriter& writer, std::size_t tensor, TensorRun run,
                   std::uint64_t beside) {
    const std::uint64_t lead = writer.lead_bytes(tensor, run.first);
    EXPECT_EQ(lead, offset_of(tensor, run.first) % RangeFile::kBlockBytes);
    const std::uint64_t size = size_bytes(tensors_[tensor].type);
    const AlignedBytes array(run.count * size, lead + beside);
    for (std::uint64_t i = 0; i < array.span().size(); ++i)
      array.span()[i] = byte_of(tensor, run.first * size + i);
    co_await writer.write(tensor, std::span(&run, 1), array.span());
  }

  /// No multiple of a row.
  static constexpr std::uint64_t kRun = 33'333;
  const testing::ScratchDirectory directory_;
  Reactor reactor_;
  WorkerPool workers_{{.threads = 2, .cpus = {}}};
};

TEST_F(ArraysForAWriter, MayLieAnywhere) {
  const std::string placed = file_written("placed", 0);
  EXPECT_EQ(file_written("beside", 8), placed);
  ASSERT_EQ(placed.size(), plan_.files.front().size_bytes);
  for (std::size_t t = 0; t < tensors_.size(); ++t) {
    const std::uint64_t bytes = offset_of(t, count_of(t)) - offset_of(t, 0);
    for (std::uint64_t i = 0; i < bytes; ++i) {
      ASSERT_EQ(static_cast<std::byte>(placed[offset_of(t, 0) + i]), byte_of(t, i))
          << tensors_[t].name << " byte " << i;
    }
  }
}

}  // namespace checkpoint_writer_test
}  // namespace ziggurat
