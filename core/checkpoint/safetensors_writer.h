// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/safetensors_writer.h: a model file in the safetensors format, written in one pass
// with bounded memory.
//
// The file appears under its name only when it is whole: it is built beside it under a temporary
// name, synced and renamed. Format (huggingface/safetensors, README "Format"): 8 bytes
// little-endian length of the header, the header as JSON, padded with spaces so that data begins
// 8-byte aligned, then the tensors, contiguous, in the order of their offsets, little-endian.
// Blocking calls, one thread. Not a reader.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/checkpoint/tensor_type.h"

namespace ziggurat {

struct SafetensorsTensor {
  std::string name;
  TensorType type = TensorType::kF32;
  std::vector<std::int64_t> shape;

  std::uint64_t count() const noexcept;
  std::uint64_t size_bytes() const noexcept { return count() * ziggurat::size_bytes(type); }
};

/// The length and the JSON: everything of a file before its first tensor.
/// Errors: kInvalidArgument for a name that is empty, repeated or "__metadata__", a negative
/// dimension, or a header above the 100 MB that readers accept.
std::string safetensors_header(std::span<const SafetensorsTensor> tensors,
                               const std::map<std::string, std::string>& metadata);

class SafetensorsWriter {
 public:
  struct Options {
    bool overwrite = false;  ///< replace a file that is there; otherwise that is an error
    std::map<std::string, std::string>
        metadata;  ///< "__metadata__"; {"format", "pt"} is what transformers looks for
  };

  /// Creates the temporary file and writes the header. Errors: kInvalidArgument (see
  /// safetensors_header; the file exists and may not be replaced; the folder is not there),
  /// kResourceExhausted (the disk is full), errno's with the path.
  SafetensorsWriter(std::string path, std::vector<SafetensorsTensor> tensors, Options options);
  ~SafetensorsWriter();  ///< without finish(): removes the temporary file, so that nothing
                         ///< half-written stays
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  /// The next values, in the order of the tensors and of their elements; a call may cross from one
  /// tensor to the next. bf16 and fp16 tensors are rounded (float_to_bf16, float_to_fp16:
  /// fp16 becomes infinite from 65,520 on). Errors: kInvalidArgument past
  /// the last element; errno's with path and offset.
  void append(std::span<const float> values);

  /// The next values of the tensor whose turn it is, as its type has them: every bit stays. Errors:
  /// kInvalidArgument past its last element, or for a part of a value; errno's.
  void append_bits(std::span<const std::byte> bytes);

  /// Every tensor is whole: syncs, renames, syncs the folder. Errors: kInvalidArgument if values
  /// are missing, naming the tensor; errno's. After an error nothing is under the final name that
  /// was not there before.
  void finish();

  std::uint64_t file_bytes() const noexcept { return file_bytes_; }
  std::uint64_t written_bytes() const noexcept { return written_bytes_; }

 private:
  void pass_whole_tensors() noexcept;
  void write(std::span<const std::byte> bytes);
  std::span<const std::byte> rounded(std::span<const float> values, std::uint16_t (*round)(float));

  std::string path_;
  std::string temporary_path_;
  std::vector<SafetensorsTensor> tensors_;
  bool overwrite_;
  int fd_ = -1;
  std::size_t tensor_ = 0;     // the one being written
  std::uint64_t element_ = 0;  // of it
  std::uint64_t written_bytes_ = 0;
  std::uint64_t file_bytes_ = 0;
  std::vector<std::byte> buffer_;  // rounded values, kBufferBytes at most
};

}  // namespace ziggurat
