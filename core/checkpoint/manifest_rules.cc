// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/manifest_rules.cc: checks names and sizes, and that pieces cover their tensors
// once.
#include "core/checkpoint/manifest_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/error.h"

namespace ziggurat {
namespace {

constexpr std::uint64_t kTensorElementsMax = std::uint64_t{1} << 50;
constexpr std::size_t kDimensionsMax = 16;
constexpr std::size_t kNameBytesMax = 255;
constexpr std::uint64_t kFileBytesMax = std::uint64_t{1} << 60;

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorCode::kDataLoss, why); }

void require_file_names(const Manifest& manifest) {
  std::set<std::string> names;
  for (const StateFile& file : manifest.files) {
    const std::string& name = file.name;
    const bool leaves = name.empty() || name.front() == '.' || name.size() > kNameBytesMax ||
                        name == Manifest::kFileName ||
                        name.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos;
    if (leaves) refuse(fmt::format("a shard cannot have the name '{}'", name));
    if (!names.insert(name).second)
      refuse(fmt::format("the manifest names the file '{}' twice", name));
    if (file.header_bytes < 8 || file.header_bytes > file.size_bytes ||
        file.size_bytes > kFileBytesMax) {
      refuse(fmt::format(
          "the header of file '{}' has {} bytes, which do not fit in a file of {} bytes", name,
          file.header_bytes, file.size_bytes));
    }
  }
}

void require_tensors(const StateContent& content) {
  std::set<std::string> names;
  for (const StateTensor& tensor : content.tensors) {
    if (tensor.name.empty() || tensor.owner.empty() || tensor.array.empty())
      refuse(
          fmt::format("a tensor has the name '{}', the owner '{}' and the array '{}', of which "
                      "none may be empty",
                      tensor.name, tensor.owner, tensor.array));
    if (!names.insert(tensor.name).second)
      refuse(fmt::format("the manifest names the tensor '{}' twice", tensor.name));
    if ((tensor.array == "master") != (tensor.name == tensor.owner))
      refuse(
          fmt::format("tensor '{}' is array '{}' of '{}', but masters, and only masters, must have "
                      "their parameter's name",
                      tensor.name, tensor.array, tensor.owner));
    if (tensor.shape.size() > kDimensionsMax)
      refuse(fmt::format("tensor '{}' has {} dimensions, but at most {} are supported", tensor.name,
                         tensor.shape.size(), kDimensionsMax));
    std::uint64_t count = 1;
    for (const std::int64_t dimension : tensor.shape) {
      if (dimension < 1 || static_cast<std::uint64_t>(dimension) > kTensorElementsMax / count)
        refuse(
            fmt::format("tensor '{}' has a dimension of {}, but dimensions must be at least 1, and "
                        "their product at most {}",
                        tensor.name, dimension, kTensorElementsMax));
      count *= static_cast<std::uint64_t>(dimension);
    }
  }
}

void require_inside(const StateTensor& tensor, const StatePiece& piece) {
  const TensorBox& box = piece.box;
  if (box.offsets.size() != tensor.shape.size() || box.shape.size() != tensor.shape.size())
    refuse(fmt::format(
        "tensor '{}' has {} dimensions, but one of its pieces has {} offsets and {} sizes",
        tensor.name, tensor.shape.size(), box.offsets.size(), box.shape.size()));
  for (std::size_t d = 0; d < tensor.shape.size(); ++d) {
    if (box.offsets[d] < 0 || box.shape[d] < 1 || box.offsets[d] > tensor.shape[d] ||
        box.shape[d] > tensor.shape[d] - box.offsets[d])
      refuse(fmt::format("a piece of tensor '{}' lies outside of the tensor", tensor.name));
  }
}

/// Returns how many bytes a piece has in its file.
std::uint64_t bytes_of(const Manifest& manifest, const StatePiece& piece) {
  return piece.box.count() * size_bytes(manifest.content.tensors[piece.tensor].type);
}

void require_piece(const Manifest& manifest, const StatePiece& piece) {
  if (piece.tensor >= manifest.content.tensors.size())
    refuse(fmt::format("a piece belongs to tensor {}, but the manifest has only {} tensors",
                       piece.tensor, manifest.content.tensors.size()));
  const StateTensor& tensor = manifest.content.tensors[piece.tensor];
  if (piece.file >= manifest.files.size())
    refuse(fmt::format("a piece of tensor '{}' is in file {}, but the manifest has only {} files",
                       tensor.name, piece.file, manifest.files.size()));
  require_inside(tensor, piece);
  const StateFile& file = manifest.files[piece.file];
  const std::uint64_t bytes = bytes_of(manifest, piece);
  if (piece.offset_bytes < file.header_bytes || piece.offset_bytes > file.size_bytes ||
      bytes > file.size_bytes - piece.offset_bytes)
    refuse(
        fmt::format("a piece of tensor '{}' has {} bytes at offset {}, which do not fit between "
                    "the header and the end of file '{}' of {} bytes",
                    tensor.name, bytes, piece.offset_bytes, file.name, file.size_bytes));
  std::uint64_t hashed = 0;
  for (const HashedBytes& its : piece.hashed) {
    if (its.size_bytes < 1 || its.size_bytes > kHashedBytesMax || its.size_bytes > bytes - hashed)
      refuse(fmt::format(
          "a hash of tensor '{}' covers {} bytes, but must cover at least 1 and at most {}",
          tensor.name, its.size_bytes, std::min(kHashedBytesMax, bytes - hashed)));
    hashed += its.size_bytes;
  }
  if (hashed != bytes)
    refuse(fmt::format("a piece of tensor '{}' has hashes for only {} of its {} bytes", tensor.name,
                       hashed, bytes));
}

/// Refuses pieces of one file that overlap, and a tensor that is twice in a file.
void require_files(const Manifest& manifest) {
  std::vector<std::map<std::uint64_t, const StatePiece*>> by_file(manifest.files.size());
  std::vector<std::set<std::uint32_t>> tensors(manifest.files.size());
  for (const StatePiece& piece : manifest.pieces) {
    const std::string& name = manifest.content.tensors[piece.tensor].name;
    if (!tensors[piece.file].insert(piece.tensor).second)
      refuse(fmt::format("tensor '{}' has two pieces in file '{}'", name,
                         manifest.files[piece.file].name));
    if (!by_file[piece.file].emplace(piece.offset_bytes, &piece).second)
      refuse(fmt::format("tensor '{}' overlaps another tensor in file '{}'", name,
                         manifest.files[piece.file].name));
  }
  for (std::size_t f = 0; f < by_file.size(); ++f) {
    std::uint64_t end = 0;
    for (const auto& [begin, piece] : by_file[f]) {
      if (begin < end)
        refuse(fmt::format("tensor '{}' overlaps another tensor in file '{}'",
                           manifest.content.tensors[piece->tensor].name, manifest.files[f].name));
      end = begin + bytes_of(manifest, *piece);
    }
  }
}

/// Returns true if any boxes overlap. Such boxes share a stretch of the first dimension, so only
/// those that do are compared.
bool overlap(std::vector<const TensorBox*> boxes) {
  if (boxes.size() < 2) return false;
  if (boxes[0]->shape.empty()) return true;
  std::ranges::sort(boxes, {}, [](const TensorBox* box) { return box->offsets[0]; });
  std::vector<const TensorBox*> open;
  for (const TensorBox* box : boxes) {
    std::erase_if(open, [&](const TensorBox* earlier) {
      return earlier->offsets[0] + earlier->shape[0] <= box->offsets[0];
    });
    for (const TensorBox* earlier : open) {
      if (common(*earlier, *box)) return true;
    }
    open.push_back(box);
  }
  return false;
}

/// Requires that pieces have as many elements as their tensor and do not overlap: they cover all of
/// it then.
void require_covered(const Manifest& manifest) {
  std::vector<std::vector<const TensorBox*>> boxes(manifest.content.tensors.size());
  for (const StatePiece& piece : manifest.pieces) boxes[piece.tensor].push_back(&piece.box);
  for (std::size_t t = 0; t < boxes.size(); ++t) {
    const StateTensor& tensor = manifest.content.tensors[t];
    std::uint64_t count = 0;
    for (const TensorBox* box : boxes[t]) {
      if (box->count() > tensor.count() - count)
        refuse(fmt::format("the pieces of tensor '{}' overlap", tensor.name));
      count += box->count();
    }
    if (count != tensor.count())
      refuse(fmt::format("the pieces of tensor '{}' have only {} of its {} elements", tensor.name,
                         count, tensor.count()));
    if (overlap(boxes[t])) refuse(fmt::format("the pieces of tensor '{}' overlap", tensor.name));
  }
}

}  // namespace

std::string broken_rule(const Manifest& manifest) {
  try {
    require_file_names(manifest);
    require_tensors(manifest.content);
    for (const StatePiece& piece : manifest.pieces) require_piece(manifest, piece);
    require_files(manifest);
    require_covered(manifest);
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

}  // namespace ziggurat
