// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/checkpoint_reader.h: a checkpoint directory as a source of state. Every byte that
// it gives out was hashed and compared first. Reactor's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "aio/range_file.h"
#include "base/runtime/worker_pool.h"
#include "core/checkpoint/manifest.h"
#include "core/checkpoint/proven_bytes.h"
#include "core/checkpoint/state_source.h"

namespace ziggurat {

class CheckpointReader final : public StateSource {
 public:
  struct Environment {
    Reactor& reactor;
    Workers& workers;
    IoEngine& io;
    IoObservers observers{};
  };
  /// Most bytes of proven data that are kept, in case the next chunk needs the rest of them.
  static constexpr std::uint64_t kKeptBytesMax = std::uint64_t{32} << 20;

  /// Reads the manifest of `directory`, opens the shards and compares their sizes. Errors:
  /// kInvalidArgument if there is no checkpoint; kDataLoss naming what is wrong.
  static Task<std::unique_ptr<CheckpointReader>> open(Environment environment,
                                                      std::string directory);

  const StateContent& content() const noexcept override { return manifest_.content; }
  const Manifest& manifest() const noexcept { return manifest_; }
  Task<> read(std::size_t tensor, std::span<const TensorRun> runs,
              std::span<std::byte> array) override;
  std::string place() const override { return directory_; }

  /// Reads and compares all bytes of a piece, or of a file's header.
  Task<> prove(const StatePiece& piece);
  Task<> prove_header(std::size_t file);

 private:
  CheckpointReader(Environment environment, std::string directory)
      : environment_(environment),
        directory_(std::move(directory)),
        proven_(environment.reactor, memory_, kKeptBytesMax) {}

  Task<> read_manifest();
  std::string cut_off(std::size_t file, std::uint64_t size_bytes) const;
  Task<> read_hashed(const StatePiece& piece, std::size_t index, std::uint64_t begin,
                     std::span<std::byte> into);
  Task<> read_piece(std::size_t piece, std::uint64_t first, std::uint64_t count,
                    std::span<std::byte> out);

  Environment environment_;
  std::string directory_;
  Manifest manifest_;
  std::vector<std::unique_ptr<RangeFile>> files_;
  std::vector<std::vector<std::size_t>> pieces_of_;  // per tensor
  // per piece: where its hashed stretches begin, in bytes
  std::vector<std::vector<std::uint64_t>> hashed_begins_;
  AlignedPool memory_;
  ProvenBytes proven_;
};

}  // namespace ziggurat
