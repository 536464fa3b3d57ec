// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/safetensors_source.h: weights that other tools saved, as a source of state: a
// safetensors file, or a directory that transformers saved. Reactor's thread.
//
// The format has no hashes, so headers are checked, but values are taken as they are.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "aio/text_file.h"
#include "core/checkpoint/safetensors_header.h"
#include "core/checkpoint/state_source.h"

namespace ziggurat {

class SafetensorsSource final : public StateSource {
 public:
  static constexpr std::string_view kFileName = "model.safetensors";
  static constexpr std::string_view kIndexName = "model.safetensors.index.json";
  static constexpr std::string_view kConfigName = "config.json";

  /// Returns true if `path` ends like a safetensors file or is a directory with weights or an
  /// index.
  static bool is_there(IoEngine& io, const std::string& path);
  /// Opens the files. Names that begin with `prefix` lose it, because a model with a head prefixes
  /// the names of its body. Errors: kDataLoss naming the file and the tensor; kInvalidArgument for
  /// a shard of a checkpoint, whose tensors are parts.
  static Task<std::unique_ptr<SafetensorsSource>> open(TextPlace files, std::string path,
                                                       std::string prefix);

  /// Masters in the types that the files have. Tensors that no parameter can be are in left_out().
  const StateContent& content() const noexcept override { return content_; }
  Task<> read(std::size_t tensor, std::span<const TensorRun> runs,
              std::span<std::byte> array) override;
  std::string place() const override { return path_; }

  /// Tensors that no parameter can be, with their types: "h.0.attn.bias (BOOL)".
  const std::vector<std::string>& left_out() const noexcept { return left_out_; }
  /// Text of the config.json beside the weights; empty if there is none.
  const std::string& config() const noexcept { return config_; }

 private:
  struct Place {
    std::size_t file;
    std::uint64_t offset_bytes;
  };
  SafetensorsSource(TextPlace files, std::string path, std::string prefix)
      : where_(files), path_(std::move(path)), prefix_(std::move(prefix)) {}
  Task<> open_all();
  /// Adds a file's tensors: those named in `wanted`, or all if that is null.
  Task<> add_file(std::string path, const std::vector<std::string>* wanted);
  void add_tensor(const StoredTensor& tensor, Place place);

  TextPlace where_;
  std::string path_;
  std::string prefix_;
  StateContent content_;
  std::vector<std::unique_ptr<DirectFile>> files_;
  std::vector<Place> places_;  // of content_'s tensors
  std::vector<std::string> left_out_;
  std::string config_;
};

}  // namespace ziggurat
