// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/safetensors_header.h: what a safetensors file says of itself, from files that
// nobody vouches for.
//
// Format: huggingface/safetensors, README "Format". Refused beside what is no such file: a header
// of over 100 MB (the reference reader's limit), a key twice, tensors that overlap, leave holes or
// leave the file, sizes that are not those of type and shape. Any thread.
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
/// Before the JSON: its length, little-endian.
inline constexpr std::uint64_t kSafetensorsLengthBytes = 8;

struct StoredTensor {
  std::string name;
  std::string type_name;           ///< "I64": as the format has it
  std::optional<TensorType> type;  ///< none: of a type that the engine has no use for
  std::vector<std::int64_t> shape;
  std::uint64_t offset_bytes = 0;  ///< from where the header ends
  std::uint64_t size_bytes = 0;
};

struct SafetensorsHeader {
  std::vector<StoredTensor> tensors;  ///< in the order of their offsets
  std::map<std::string, std::string> metadata;
};

/// The length of the JSON, from the file's first bytes. Errors: kDataLoss naming `place` where the
/// file is too short for it.
std::uint64_t safetensors_json_bytes(std::string_view first, std::uint64_t file_bytes,
                                     const std::string& place);
/// `data_bytes`: what follows the header. Errors: kDataLoss naming `place` and the tensor.
SafetensorsHeader parse_safetensors_header(std::string_view json, std::uint64_t data_bytes,
                                           const std::string& place);

}  // namespace ziggurat
