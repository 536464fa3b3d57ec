// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/checkpoint_writer.cc: writes runs of tensors to stretches of files.
#include "core/checkpoint/checkpoint_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/checksum.h"
#include "base/error.h"

namespace ziggurat {

CheckpointWriter::CheckpointWriter(Environment environment, std::string directory, ShardPlan plan,
                                   std::vector<StateTensor> tensors)
    : environment_(environment),
      directory_(std::move(directory)),
      plan_(std::move(plan)),
      tensors_(std::move(tensors)),
      pieces_of_(tensors_.size()),
      hashed_(plan_.pieces.size()) {
  for (std::size_t p = 0; p < plan_.pieces.size(); ++p)
    pieces_of_[plan_.pieces[p].tensor].push_back(p);
}

Task<std::unique_ptr<CheckpointWriter>> CheckpointWriter::create(Environment environment,
                                                                 std::string directory,
                                                                 ShardPlan plan,
                                                                 std::vector<StateTensor> tensors) {
  std::unique_ptr<CheckpointWriter> writer(
      new CheckpointWriter(environment, std::move(directory), std::move(plan), std::move(tensors)));
  const ShardPlan& of = writer->plan_;
  const std::function<void()> make = [&] { writer->make_files(); };
  std::exception_ptr error;
  try {
    co_await environment.calls.run(environment.reactor, make);
    for (std::size_t f = 0; f < of.files.size(); ++f)
      co_await writer->files_[f]->write(0, std::as_bytes(std::span(of.headers[f])));
  } catch (...) {
    error = std::current_exception();
  }
  if (error) {
    const std::function<void()> remove = [&] { writer.reset(); };
    co_await environment.calls.run(environment.reactor, remove);
    std::rethrow_exception(error);
  }
  co_return std::move(writer);
}

/// Reserves all space first, so that a disk that is too small is found out before anything is
/// written.
void CheckpointWriter::make_files() {
  for (const StateFile& file : plan_.files) {
    paths_.push_back(directory_ + "/" + file.name);
    files_.push_back(RangeFile::open(environment_.reactor, environment_.io, paths_.back(),
                                     {.create = true, .writable = true}, environment_.observers));
    files_.back()->allocate(file.size_bytes);
  }
}

CheckpointWriter::~CheckpointWriter() {
  if (!kept_) remove_files();
}

void CheckpointWriter::remove_files() noexcept {
  files_.clear();
  for (const std::string& path : paths_) {
    try {
      environment_.io.remove(path);
    } catch (const std::exception&) {
      // A file that stays does no harm: no manifest names it, and the next save removes it.
    }
  }
}

std::vector<CheckpointWriter::Segment> CheckpointWriter::segments(
    const StateTensor& tensor, const StatePiece& piece, std::span<const TensorRun> runs) const {
  std::vector<Segment> found;
  for (const TensorRun& run : runs) {
    std::uint64_t at = run.at;
    for (const TensorBox& box : boxes_of(tensor.shape, run.first, run.count)) {
      for_each_common_run(box, piece.box,
                          [&](std::uint64_t in_box, std::uint64_t in_piece, std::uint64_t count) {
                            found.push_back({in_piece, at + in_box, count});
                          });
      at += box.count();
    }
  }
  std::ranges::sort(found, {}, &Segment::in_piece);
  return found;
}

std::uint64_t CheckpointWriter::lead_bytes(std::size_t tensor, std::uint64_t first) const {
  const TensorRun one{.first = first, .count = 1, .at = 0};
  for (const std::size_t p : pieces_of_[tensor]) {
    const StatePiece& piece = plan_.pieces[p];
    const std::vector<Segment> found = segments(tensors_[tensor], piece, std::span(&one, 1));
    if (found.empty()) continue;
    const std::uint64_t size = ziggurat::size_bytes(tensors_[tensor].type);
    return (piece.offset_bytes + found.front().in_piece * size) % RangeFile::kBlockBytes;
  }
  return 0;
}

/// Whether segments that follow one another in a piece do so in the array too.
bool CheckpointWriter::lie_together(std::span<const Segment> segments) {
  const Segment& first = segments.front();
  return std::ranges::all_of(segments, [&](const Segment& its) {
    return its.at - first.at == its.in_piece - first.in_piece;
  });
}

Task<> CheckpointWriter::write(std::size_t tensor, std::span<const TensorRun> runs,
                               std::span<const std::byte> array) {
  for (const std::size_t piece : pieces_of_[tensor]) {
    const std::vector<Segment> found = segments(tensors_[tensor], plan_.pieces[piece], runs);
    // Usually all segments are one stretch of the file.
    for (std::size_t begin = 0; begin < found.size();) {
      std::size_t end = begin + 1;
      while (end < found.size() &&
             found[end].in_piece == found[end - 1].in_piece + found[end - 1].count)
        ++end;
      co_await write_piece(piece, std::span(found).subspan(begin, end - begin), array);
      begin = end;
    }
  }
}

Task<> CheckpointWriter::write_piece(std::size_t index, std::span<const Segment> segments,
                                     std::span<const std::byte> array) {
  const StatePiece& piece = plan_.pieces[index];
  const std::uint64_t size = ziggurat::size_bytes(tensors_[piece.tensor].type);
  const std::uint64_t first = segments.front().in_piece;
  const std::uint64_t count = segments.back().in_piece + segments.back().count - first;
  const std::uint64_t offset = piece.offset_bytes + first * size;
  const std::uint64_t bytes = count * size;
  ZIGGURAT_CHECK(bytes <= kHashedBytesMax, "{} bytes of '{}' at once", bytes,
                 tensors_[piece.tensor].name);
  std::span<const std::byte> stretch;
  std::optional<AlignedBytes> copied;
  if (lie_together(segments)) stretch = array.subspan(segments.front().at * size, bytes);
  if (stretch.empty() || !RangeFile::is_placed(offset, stretch)) {
    copied = RangeFile::memory_for(offset, bytes, memory_);
    stretch = copied->span();
  }
  std::uint64_t hash = 0;
  const std::function<void()> job = [&] {
    for (const Segment& segment : copied ? segments : std::span<const Segment>()) {
      std::memcpy(copied->span().data() + (segment.in_piece - first) * size,
                  array.data() + segment.at * size, segment.count * size);
    }
    hash = hash64(stretch, 0);
  };
  co_await environment_.workers.run(environment_.reactor, {"hash checkpoint", stretch.size()}, job);
  co_await files_[piece.file]->write(offset, stretch, IoPriority::kWriteBack);
  const auto [its, fresh] = hashed_[index].insert_or_assign(
      first * size, HashedBytes{.size_bytes = stretch.size(), .hash = hash});
  if (fresh) written_bytes_ += stretch.size();
}

/// Requires that everything of the piece was given exactly once.
void CheckpointWriter::finish_piece(std::size_t index) {
  StatePiece& piece = plan_.pieces[index];
  const StateTensor& tensor = tensors_[piece.tensor];
  const std::uint64_t bytes = piece.box.count() * ziggurat::size_bytes(tensor.type);
  const auto refuse = [&](std::uint64_t begin, std::uint64_t end, const char* what) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: bytes {} to {} of the {} bytes of '{}' were {}: give every byte "
                            "of the announced part exactly once",
                            directory_, begin, end, bytes, tensor.name, what));
  };
  std::uint64_t end = 0;
  piece.hashed.clear();
  for (const auto& [begin, hashed] : hashed_[index]) {
    if (begin > end) refuse(end, begin, "not given");
    if (begin < end) refuse(begin, end, "given twice");
    end += hashed.size_bytes;
    piece.hashed.push_back(hashed);
  }
  if (end < bytes) refuse(end, bytes, "not given");
}

Task<std::vector<StatePiece>> CheckpointWriter::finish() {
  for (std::size_t p = 0; p < plan_.pieces.size(); ++p) finish_piece(p);
  for (const std::unique_ptr<RangeFile>& file : files_) co_await file->sync();
  files_.clear();
  co_return plan_.pieces;
}

}  // namespace ziggurat
