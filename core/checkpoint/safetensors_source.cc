// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/safetensors_source.cc: opens one file or those of an index, and finds where each
// tensor lies.
#include "core/checkpoint/safetensors_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/strict_json.h"

namespace ziggurat {
namespace {

constexpr std::string_view kEnding = ".safetensors";
/// Longest index or config that is read: as long as the longest header.
constexpr std::uint64_t kTextBytesMax = kSafetensorsHeaderBytesMax;

std::string in(const std::string& directory, std::string_view name) {
  return fmt::format("{}/{}", directory, name);
}

/// Returns the names of files, each with the tensors that the index says it has.
std::map<std::string, std::vector<std::string>> files_of(const std::string& text,
                                                         const std::string& path) {
  const nlohmann::json parsed = parse_strict(text, path);
  const JsonField map = JsonField(parsed, path).at("weight_map");
  if (!map.value().is_object()) map.refuse("weight_map must be a JSON object");
  std::map<std::string, std::vector<std::string>> files;
  for (const auto& [name, value] : map.value().items()) {
    const JsonField field(value, fmt::format("{}.{}", map.path(), name));
    const std::string file = field.text();
    if (file.empty() || file.front() == '.' || file.find('/') != std::string::npos)
      field.refuse(fmt::format("'{}' is not the name of a file in this directory", file));
    files[file].push_back(name);
  }
  if (files.empty()) map.refuse("weight_map names no tensor");
  return files;
}

}  // namespace

bool SafetensorsSource::is_there(IoEngine& io, const std::string& path) {
  return path.ends_with(kEnding) || io.exists(in(path, kIndexName)) ||
         io.exists(in(path, kFileName));
}

Task<std::unique_ptr<SafetensorsSource>> SafetensorsSource::open(TextPlace files, std::string path,
                                                                 std::string prefix) {
  std::unique_ptr<SafetensorsSource> source(
      new SafetensorsSource(files, std::move(path), std::move(prefix)));
  co_await source->open_all();
  co_return std::move(source);
}

Task<> SafetensorsSource::open_all() {
  content_.model = "weights";
  if (path_.ends_with(kEnding)) {
    co_await add_file(path_, nullptr);
  } else {
    if (const std::string config = in(path_, kConfigName); where_.io.exists(config))
      config_ = co_await read_text(where_, config, kTextBytesMax);
    if (const std::string index = in(path_, kIndexName); where_.io.exists(index)) {
      const std::string text = co_await read_text(where_, index, kTextBytesMax);
      const auto files = files_of(text, index);
      for (const auto& [file, names] : files) co_await add_file(in(path_, file), &names);
    } else {
      co_await add_file(in(path_, kFileName), nullptr);
    }
  }
  std::set<std::string> names;
  for (const StateTensor& tensor : content_.tensors) {
    if (names.insert(tensor.name).second) continue;
    throw Error(ErrorCode::kDataLoss,
                fmt::format("{} has two tensors called '{}'", path_, tensor.name));
  }
  if (content_.tensors.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} has no tensor of a type that a parameter can have", path_));
  }
  content_.dtype = dtype_of(content_.tensors.front().type).value_or(DType::kFloat32);
}

Task<> SafetensorsSource::add_file(std::string path, const std::vector<std::string>* wanted) {
  if (!where_.io.exists(path))
    throw Error(ErrorCode::kInvalidArgument, fmt::format("the file {} does not exist", path),
                ENOENT);
  files_.push_back(
      DirectFile::open(where_.reactor, where_.io, path, {.direct = false}, where_.observers));
  DirectFile& file = *files_.back();
  const std::uint64_t size = file.size_bytes();
  std::string first(std::min(size, kSafetensorsLengthBytes), '\0');
  co_await file.read(0, std::as_writable_bytes(std::span(first)));
  std::string json(safetensors_json_bytes(first, size, path), '\0');
  co_await file.read(kSafetensorsLengthBytes, std::as_writable_bytes(std::span(json)));
  const std::uint64_t begin = kSafetensorsLengthBytes + json.size();
  const SafetensorsHeader header = parse_safetensors_header(json, size - begin, path);
  if (header.metadata.contains("DCP_SHARDING_INFO")) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} is a shard of a checkpoint, whose tensors are only parts: give the "
                            "directory that has the checkpoint's manifest",
                            path));
  }
  std::set<std::string> left;
  if (wanted != nullptr) left.insert(wanted->begin(), wanted->end());
  for (const StoredTensor& tensor : header.tensors) {
    if (wanted != nullptr && left.erase(tensor.name) == 0) continue;
    add_tensor(tensor, {.file = files_.size() - 1, .offset_bytes = begin + tensor.offset_bytes});
  }
  if (left.empty()) co_return;
  throw Error(
      ErrorCode::kDataLoss,
      fmt::format("{} does not have '{}', although the index names that tensor for this file", path,
                  *left.begin()));
}

void SafetensorsSource::add_tensor(const StoredTensor& tensor, Place place) {
  // Codes are never weights, and no parameter of a model is without an element.
  if (!tensor.type || !dtype_of(*tensor.type) || tensor.size_bytes == 0) {
    left_out_.push_back(fmt::format("{} ({})", tensor.name, tensor.type_name));
    return;
  }
  std::string name = tensor.name;
  if (name.starts_with(prefix_)) name.erase(0, prefix_.size());
  content_.tensors.push_back({.name = name,
                              .owner = name,
                              .array = "master",
                              .type = *tensor.type,
                              .shape = tensor.shape});
  places_.push_back(place);
}

Task<> SafetensorsSource::read(std::size_t tensor, std::span<const TensorRun> runs,
                               std::span<std::byte> array) {
  const std::uint64_t size = size_bytes(content_.tensors[tensor].type);
  const Place& place = places_[tensor];
  for (const TensorRun& run : runs) {
    co_await files_[place.file]->read(place.offset_bytes + run.first * size,
                                      array.subspan(run.at * size, run.count * size));
  }
}

}  // namespace ziggurat
