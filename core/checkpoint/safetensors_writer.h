// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/safetensors_writer.h: a model file in the safetensors format, written in one pass
// with bounded memory.
//
// The file is built under a temporary name in the same folder and synced. It gets its own name only
// when it is whole. Format (huggingface/safetensors, README "Format"): the length of the header in
// 8 bytes, little-endian; the header as JSON, padded with spaces so that data begins 8-byte
// aligned; then the tensors without gaps, in the order of their offsets, little-endian. Blocking
// calls, one thread. Does not read such files.
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

/// Returns the length and the JSON: everything of a file before its first tensor. Errors:
/// kInvalidArgument for a name that is empty, repeated or "__metadata__", a negative dimension, or
/// a header above the 100 MB that readers accept.
std::string safetensors_header(std::span<const SafetensorsTensor> tensors,
                               const std::map<std::string, std::string>& metadata);

class SafetensorsWriter {
 public:
  struct Options {
    bool overwrite = false;  ///< replaces a file that exists; otherwise that is an error
    std::map<std::string, std::string>
        metadata;  ///< "__metadata__"; transformers looks for {"format", "pt"}
  };

  /// Creates the temporary file and writes the header. Errors: kInvalidArgument (see
  /// safetensors_header(); or the file exists and must not be replaced; or the folder does not
  /// exist), kResourceExhausted (the disk is full), system errors with the path.
  SafetensorsWriter(std::string path, std::vector<SafetensorsTensor> tensors, Options options);
  ~SafetensorsWriter();  ///< removes the temporary file unless finish() succeeded
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  /// Appends values in the order of the tensors and of their elements; a call may cross from one
  /// tensor to the next. Values of bf16 and fp16 tensors are rounded (float_to_bf16, float_to_fp16:
  /// fp16 becomes infinite from 65,520 on). Errors: kInvalidArgument past the last element; system
  /// errors with path and offset.
  void append(std::span<const float> values);

  /// Appends values of the tensor that is being written, in that tensor's type, bit for bit.
  /// Errors: kInvalidArgument past its last element, or for a part of a value; system errors.
  void append_bits(std::span<const std::byte> bytes);

  /// Ends the file after every tensor is whole: syncs it, renames it and syncs the folder. Errors:
  /// kInvalidArgument if values are missing, naming the tensor; system errors. After an error
  /// nothing has the final name that did not have it before.
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
  std::size_t tensor_ = 0;     // number of the tensor that is being written
  std::uint64_t element_ = 0;  // of it
  std::uint64_t written_bytes_ = 0;
  std::uint64_t file_bytes_ = 0;
  std::vector<std::byte> buffer_;  // rounded values, at most kBufferBytes
};

}  // namespace ziggurat
