// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/safetensors_header.h: reads what a safetensors file says of itself, from a file
// that may be damaged.
//
// Format: huggingface/safetensors, README "Format". Refuses, besides files of another format, a
// header of over 100 MB (the reference reader's limit), a key that is there twice, tensors that
// overlap, leave holes or leave the file, and sizes that do not fit type and shape. Any thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/checkpoint/tensor_type.h"

namespace ziggurat {

inline constexpr std::uint64_t kSafetensorsHeaderBytesMax = 100'000'000;
/// Number of bytes before the JSON, which hold its length, little-endian.
inline constexpr std::uint64_t kSafetensorsLengthBytes = 8;

struct StoredTensor {
  std::string name;
  std::string type_name;           ///< the format's name of the type, such as "I64"
  std::optional<TensorType> type;  ///< empty for a type that the engine has no use for
  std::vector<std::int64_t> shape;
  std::uint64_t offset_bytes = 0;  ///< counted from where the header ends
  std::uint64_t size_bytes = 0;
};

struct SafetensorsHeader {
  std::vector<StoredTensor> tensors;  ///< in the order of their offsets
  std::map<std::string, std::string> metadata;
};

/// Returns the length of the JSON, read from the file's first bytes. Errors: kDataLoss naming
/// `place` if the file is too short for it.
std::uint64_t safetensors_json_bytes(std::string_view first, std::uint64_t file_bytes,
                                     const std::string& place);
/// Reads a header that `data_bytes` follow in the file. Errors: kDataLoss naming `place` and the
/// tensor.
SafetensorsHeader parse_safetensors_header(std::string_view json, std::uint64_t data_bytes,
                                           const std::string& place);

}  // namespace ziggurat
