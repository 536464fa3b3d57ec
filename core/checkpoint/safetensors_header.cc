// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/safetensors_header.cc: reads a header, and believes nothing before it is checked.
#include "core/checkpoint/safetensors_header.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/strict_json.h"

namespace ziggurat {
namespace {

constexpr std::string_view kMetadata = "__metadata__";
constexpr std::size_t kDimensionsMax = 64;

/// Types whose values are whole bytes. Types of 4 and 6 bits are left out, because no training
/// state has them.
constexpr std::array<std::pair<std::string_view, std::uint64_t>, 17> kSizes{{{"BOOL", 1},
                                                                             {"U8", 1},
                                                                             {"I8", 1},
                                                                             {"F8_E5M2", 1},
                                                                             {"F8_E4M3", 1},
                                                                             {"F8_E8M0", 1},
                                                                             {"I16", 2},
                                                                             {"U16", 2},
                                                                             {"F16", 2},
                                                                             {"BF16", 2},
                                                                             {"I32", 4},
                                                                             {"U32", 4},
                                                                             {"F32", 4},
                                                                             {"F64", 8},
                                                                             {"I64", 8},
                                                                             {"U64", 8},
                                                                             {"C64", 8}}};

std::uint64_t type_bytes(const JsonField& type) {
  const std::string name = type.text();
  const auto found = std::ranges::find(kSizes, name, [](const auto& known) { return known.first; });
  if (found == kSizes.end())
    type.refuse(fmt::format("this program does not know the type '{}'", name));
  return found->second;
}

std::uint64_t bytes_of(const JsonField& shape, const std::vector<std::int64_t>& dimensions,
                       std::uint64_t element_bytes) {
  std::uint64_t bytes = element_bytes;
  for (const std::int64_t dimension : dimensions) {
    if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(dimension), &bytes))
      shape.refuse("the shape has more values than a file can hold");
  }
  return bytes;
}

StoredTensor tensor_of(const std::string& name, const JsonField& field, std::uint64_t data_bytes) {
  field.require_keys({"dtype", "shape", "data_offsets"});
  const JsonField shape = field.at("shape");
  if (shape.size() > kDimensionsMax)
    shape.refuse(fmt::format("the tensor has {} dimensions, but at most {} are supported",
                             shape.size(), kDimensionsMax));
  const JsonField offsets = field.at("data_offsets");
  if (offsets.size() != 2)
    offsets.refuse(fmt::format("data_offsets must have 2 values, but has {}", offsets.size()));
  const std::uint64_t end = offsets.at(1).number(data_bytes);
  const std::uint64_t begin = offsets.at(std::size_t{0}).number(end);
  const std::uint64_t element_bytes = type_bytes(field.at("dtype"));
  StoredTensor tensor{.name = name,
                      .type_name = field.at("dtype").text(),
                      .type = parse_tensor_type(field.at("dtype").text()),
                      .shape = shape.numbers(),
                      .offset_bytes = begin,
                      .size_bytes = end - begin};
  if (const std::uint64_t needed = bytes_of(shape, tensor.shape, element_bytes);
      needed != tensor.size_bytes)
    field.refuse(
        fmt::format("the tensor has {} bytes, but its shape needs {}", tensor.size_bytes, needed));
  return tensor;
}

void require_contiguous(const std::vector<StoredTensor>& tensors, std::uint64_t data_bytes,
                        const std::string& place) {
  std::uint64_t end = 0;
  for (const StoredTensor& tensor : tensors) {
    if (tensor.offset_bytes != end) {
      throw Error(
          ErrorCode::kDataLoss,
          fmt::format("{}: '{}' begins at byte {}, but the bytes of earlier tensors end at {}",
                      place, tensor.name, tensor.offset_bytes, end));
    }
    end += tensor.size_bytes;
  }
  if (end != data_bytes) {
    throw Error(ErrorCode::kDataLoss,
                fmt::format("the tensors of {} have {} bytes, but {} bytes follow the header",
                            place, end, data_bytes));
  }
}

}  // namespace

std::uint64_t safetensors_json_bytes(std::string_view first, std::uint64_t file_bytes,
                                     const std::string& place) {
  std::uint64_t length = 0;
  if (first.size() < kSafetensorsLengthBytes || file_bytes < kSafetensorsLengthBytes) {
    throw Error(ErrorCode::kDataLoss,
                fmt::format("{} has only {} bytes, which are too few for a safetensors file", place,
                            file_bytes));
  }
  std::memcpy(&length, first.data(), sizeof(length));
  if (length > kSafetensorsHeaderBytesMax || length > file_bytes - kSafetensorsLengthBytes) {
    throw Error(ErrorCode::kDataLoss,
                fmt::format("{} is not a safetensors file or was cut off, because its header would "
                            "have {} bytes in a file of {} bytes",
                            place, length, file_bytes));
  }
  return length;
}

SafetensorsHeader parse_safetensors_header(std::string_view json, std::uint64_t data_bytes,
                                           const std::string& place) {
  const nlohmann::json parsed = parse_strict(json, place);
  const JsonField root(parsed, place);
  if (!parsed.is_object()) root.refuse("the header must be a JSON object");
  SafetensorsHeader header;
  for (const auto& [name, value] : parsed.items()) {
    const JsonField field(value, fmt::format("{}: '{}'", place, name));
    if (name == kMetadata) {
      if (!value.is_object()) field.refuse("the metadata must be a JSON object");
      for (const auto& [key, text] : value.items())
        header.metadata[key] = JsonField(text, fmt::format("{}.{}", field.path(), key)).text();
      continue;
    }
    if (name.empty()) field.refuse("a tensor has no name");
    header.tensors.push_back(tensor_of(name, field, data_bytes));
  }
  // Tensors without an element come before the tensor that begins where they do.
  std::ranges::sort(header.tensors, {}, [](const StoredTensor& tensor) {
    return std::pair(tensor.offset_bytes, tensor.size_bytes);
  });
  require_contiguous(header.tensors, data_bytes, place);
  return header;
}

}  // namespace ziggurat
