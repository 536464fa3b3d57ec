// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/piece_source.h: a source of whole tensors as a source of parts, for a rank that
// reads pieces of its own from a checkpoint. Reactor's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/checkpoint/tensor_piece.h"

namespace ziggurat {

class PieceSource final : public StateSource {
 public:
  /// A parameter of the engine that reads: its name and shape in the engine, and which part of the
  /// source's tensor it is.
  struct Param {
    std::string name;
    std::vector<std::int64_t> shape;
    TensorPiece part;
  };
  /// Gives values of a parameter whose master the source does not have.
  using ReadOwn =
      std::function<void(std::size_t param, std::uint64_t first, std::span<float> values)>;

  /// Makes a source of `params`. `whole` must outlive this, and `blob` replaces the blob of
  /// `whole`. Errors: kInvalidArgument for a shape that the source does not have; kUnimplemented
  /// for codes of 8 bits that would have to be divided within a block.
  PieceSource(StateSource& whole, std::vector<Param> params, std::vector<std::byte> blob,
              ReadOwn read_own);

  const StateContent& content() const noexcept override { return content_; }
  Task<> read(std::size_t tensor, std::span<const TensorRun> runs,
              std::span<std::byte> array) override;
  std::string place() const override { return whole_.place(); }

 private:
  static constexpr std::size_t kOwn = SIZE_MAX;  ///< stands for no tensor of the source
  /// Says where a tensor of content() is from.
  struct From {
    std::size_t tensor;
    std::size_t param = kOwn;       ///< kOwn: the source's tensor is read as it is
    std::uint64_t first_block = 0;  ///< of scales: where the part's are among the source's
  };
  /// Adds a parameter; `of_source` are the source's tensors of it, without scales.
  void add_param(std::size_t index, std::span<const std::size_t> of_source);
  void require_shape(const Param& param, const StateTensor& its) const;
  void add_units();
  void add_scales();
  void add_scales_of(std::size_t index, std::span<const std::size_t> of_source);

  StateSource& whole_;
  std::vector<Param> params_;
  ReadOwn read_own_;
  StateContent content_;
  bool alone_ = false;      // each parameter of the source is a unit, and has blocks of its own
  std::vector<From> from_;  // per tensor of content_
};

}  // namespace ziggurat
