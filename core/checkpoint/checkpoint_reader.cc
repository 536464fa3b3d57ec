// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/checkpoint_reader.cc: reads runs of tensors from the hashed stretches that hold
// them.
#include "core/checkpoint/checkpoint_reader.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "aio/text_file.h"
#include "base/checksum.h"
#include "base/error.h"
#include "core/checkpoint/tensor_box.h"

namespace ziggurat {

Task<std::unique_ptr<CheckpointReader>> CheckpointReader::open(Environment environment,
                                                               std::string directory) {
  std::unique_ptr<CheckpointReader> reader(new CheckpointReader(environment, std::move(directory)));
  co_await reader->read_manifest();
  co_return std::move(reader);
}

Task<> CheckpointReader::read_manifest() {
  const std::string path = fmt::format("{}/{}", directory_, Manifest::kFileName);
  if (!environment_.io.exists(path)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: there is no checkpoint, because the directory has no {}",
                            directory_, Manifest::kFileName),
                ENOENT);
  }
  const std::string text =
      co_await read_text({environment_.reactor, environment_.io, environment_.observers}, path,
                         Manifest::kTextBytesMax);
  const std::function<void()> parse = [&] { manifest_ = parse_manifest(text, path); };
  co_await environment_.workers.run(environment_.reactor, {"parse manifest", text.size(), true},
                                    parse);
  for (const StateFile& its : manifest_.files) {
    const std::string shard = directory_ + "/" + its.name;
    if (!environment_.io.exists(shard)) {
      throw Error(ErrorCode::kDataLoss,
                  fmt::format("{} is missing, although the manifest names it", shard), ENOENT);
    }
    files_.push_back(
        RangeFile::open(environment_.reactor, environment_.io, shard, {}, environment_.observers));
    if (const std::uint64_t found = files_.back()->size_bytes(); found != its.size_bytes) {
      throw Error(ErrorCode::kDataLoss,
                  fmt::format("{} has {} bytes, but {} were written{}", shard, found,
                              its.size_bytes, cut_off(files_.size() - 1, found)));
    }
  }
  pieces_of_.resize(manifest_.content.tensors.size());
  for (std::size_t p = 0; p < manifest_.pieces.size(); ++p) {
    pieces_of_[manifest_.pieces[p].tensor].push_back(p);
    std::vector<std::uint64_t>& begins = hashed_begins_.emplace_back();
    std::uint64_t at = 0;
    for (const HashedBytes& hashed : manifest_.pieces[p].hashed) {
      begins.push_back(at);
      at += hashed.size_bytes;
    }
  }
}

/// Names the tensors that lost bytes in a file that ends at `size_bytes`.
std::string CheckpointReader::cut_off(std::size_t file, std::uint64_t size_bytes) const {
  constexpr std::size_t kNamesMax = 8;
  std::vector<std::string> names;
  std::uint64_t more = 0;
  for (const StatePiece& piece : manifest_.pieces) {
    std::uint64_t end = piece.offset_bytes;
    for (const HashedBytes& hashed : piece.hashed) end += hashed.size_bytes;
    if (piece.file != file || end <= size_bytes) continue;
    if (names.size() == kNamesMax) {
      ++more;
    } else {
      names.push_back(fmt::format("'{}'", manifest_.content.tensors[piece.tensor].name));
    }
  }
  if (names.empty()) return "";
  return fmt::format(": bytes of {}{} are lost", fmt::join(names, ", "),
                     more > 0 ? fmt::format(" and {} others", more) : "");
}

Task<> CheckpointReader::read(std::size_t tensor, std::span<const TensorRun> runs,
                              std::span<std::byte> array) {
  const StateTensor& of = manifest_.content.tensors[tensor];
  const std::uint64_t size = size_bytes(of.type);
  struct Segment {
    std::uint64_t in_piece, at, count;
  };
  for (const std::size_t p : pieces_of_[tensor]) {
    std::vector<Segment> found;
    for (const TensorRun& run : runs) {
      std::uint64_t at = run.at;
      for (const TensorBox& box : boxes_of(of.shape, run.first, run.count)) {
        for_each_common_run(box, manifest_.pieces[p].box,
                            [&](std::uint64_t in_box, std::uint64_t in_piece, std::uint64_t count) {
                              found.push_back({in_piece, at + in_box, count});
                            });
        at += box.count();
      }
    }
    for (const Segment& segment : found) {
      co_await read_piece(p, segment.in_piece * size, segment.count * size,
                          array.subspan(segment.at * size, segment.count * size));
    }
  }
}

/// Copies bytes [first, first + count) of a piece to `out`.
Task<> CheckpointReader::read_piece(std::size_t piece, std::uint64_t first, std::uint64_t count,
                                    std::span<std::byte> out) {
  const std::vector<std::uint64_t>& begins = hashed_begins_[piece];
  auto index =
      static_cast<std::size_t>(std::ranges::upper_bound(begins, first) - begins.begin()) - 1;
  std::uint64_t at = first;
  while (at < first + count) {
    const StatePiece& of = manifest_.pieces[piece];
    const std::uint64_t begin = begins[index];
    const ProvenBytes::Read read_it = [&](std::span<std::byte> into) {
      return read_hashed(of, index, begin, into);
    };
    const ProvenBytes::Bytes its =
        co_await proven_.get({piece, index},
                             {.bytes = of.hashed[index].size_bytes,
                              .lead_bytes = (of.offset_bytes + begin) % RangeFile::kBlockBytes},
                             read_it);
    const std::span<const std::byte> bytes = its->span();
    const std::uint64_t inside = at - begins[index];
    const std::uint64_t here = std::min(bytes.size() - inside, first + count - at);
    const std::function<void()> copy = [&] {
      std::memcpy(out.data() + (at - first), bytes.data() + inside, here);
    };
    co_await run_pass(environment_.reactor, environment_.workers, "copy state", here, copy);
    at += here;
    ++index;
  }
}

Task<> CheckpointReader::read_hashed(const StatePiece& piece, std::size_t index,
                                     std::uint64_t begin, std::span<std::byte> into) {
  const HashedBytes& expected = piece.hashed[index];
  RangeFile& file = *files_[piece.file];
  co_await file.read(piece.offset_bytes + begin, into);
  std::uint64_t hash = 0;
  const std::function<void()> job = [&] { hash = hash64(into, 0); };
  co_await run_pass(environment_.reactor, environment_.workers, "verify checkpoint", into.size(),
                    job);
  if (hash == expected.hash) co_return;
  throw Error(
      ErrorCode::kDataLoss,
      fmt::format("{}: bytes {} to {}, which hold '{}', are damaged: load another checkpoint",
                  file.path(), piece.offset_bytes + begin,
                  piece.offset_bytes + begin + expected.size_bytes,
                  manifest_.content.tensors[piece.tensor].name));
}

Task<> CheckpointReader::prove(const StatePiece& piece) {
  std::uint64_t begin = 0;
  for (std::size_t i = 0; i < piece.hashed.size(); ++i) {
    const AlignedBytes bytes =
        RangeFile::memory_for(piece.offset_bytes + begin, piece.hashed[i].size_bytes, memory_);
    co_await read_hashed(piece, i, begin, bytes.span());
    begin += piece.hashed[i].size_bytes;
  }
}

Task<> CheckpointReader::prove_header(std::size_t index) {
  const StateFile& file = manifest_.files[index];
  std::vector<std::byte> header(file.header_bytes);
  co_await files_[index]->read(0, header);
  if (hash64(header, 0) == file.header_hash) co_return;
  throw Error(ErrorCode::kDataLoss,
              fmt::format("the header of {} is damaged, so other tools misread the file; ziggurat "
                          "still loads it by the manifest",
                          files_[index]->path()));
}

}  // namespace ziggurat
