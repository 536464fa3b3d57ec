// SPDX-License-Identifier: Apache-2.0
// integrations/c/embedded_checkpoint.h: checkpoints of an embedder: the state of its engines and
// what it has in memory beside it, written by all ranks and read by any. The trainer's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/typed_span.h"
#include "core/checkpoint/checkpoint_reader.h"
#include "core/checkpoint/checkpoint_save.h"
#include "core/checkpoint/tensor_piece.h"
#include "core/engine/runtime.h"
#include "integrations/c/embedded_engine.h"

namespace ziggurat {

/// What is saved, as a JSON text of the embedder's says it, with the objects beside it. A part is
/// {"param": 3, "first": 128}, elements of it that follow one another, as many as the engine's
/// parameter or the memory has, or {"param": 3, "offsets": [0, 8], "shape": [4, 8]}, a box; null:
/// it is not saved here.
struct EmbeddedSave {
  struct Param {
    std::string name;
    std::vector<std::int64_t> shape;
    bool trained = true;                 ///< an engine has its state, on some rank
    TensorType type = TensorType::kF32;  ///< of one that is not
  };
  struct Part {
    std::size_t param = 0;  ///< of `params`
    TensorPiece part;       ///< without boxes: nothing of it is saved here
  };
  struct Engine {
    EmbeddedEngine* engine;
    std::vector<Part> parts;  ///< of each of its parameters
  };
  struct Values {
    Part part;
    TypedSpan<const std::byte> memory;
  };
  /// What the engine of another rank has, which this one reads there.
  struct Other {
    std::size_t engine;  ///< of `engines`
    int rank;
    std::string name;  ///< as the parameter is called there
    Part part;
  };

  std::string folder;
  Retention retention;
  StateContent content;       ///< all but its state, units and tensors
  std::vector<Param> params;  ///< all of the model, alike on every rank
  std::vector<Engine> engines;
  std::vector<Values> values;
  bool widened = false;  ///< codes of 8 bits as the values that they stand for
  bool alone = false;    ///< this rank calls, and no other: it saves `others` too
  std::vector<Other> others;

  /// Errors: kInvalidArgument naming what is wrong with `text`, or does not fit `engines`,
  /// `memory`.
  static EmbeddedSave parse(std::string_view text, std::span<EmbeddedEngine* const> engines,
                            std::span<const TypedSpan<std::byte>> memory);
};

/// Every rank of `runtime` calls it, at the same place among its engines and exchanges, between
/// steps; or one alone. Returns when the checkpoint is durable under its name. Errors:
/// CheckpointSave's; those of copying the state, and then there is no checkpoint.
void save_checkpoint(Runtime& runtime, EmbeddedSave save);

/// The parts of an engine's parameters, and the steps that each has made.
struct EmbeddedParts {
  std::vector<TensorPiece> parts;
  std::vector<std::uint64_t> steps;
  bool weights_only = false;

  /// {"parts": [{"name": .., "shape": [..], "first": 0} or with "offsets", "box"], "steps": [..],
  /// "weights_only": false}. `counts`: elements of each parameter. Errors: kInvalidArgument.
  static EmbeddedParts parse(std::string_view text, std::span<const std::uint64_t> counts);
};

/// A checkpoint that is read.
class EmbeddedCheckpoint {
 public:
  /// The checkpoint `path`, or the newest in that folder. Errors: CheckpointReader's.
  EmbeddedCheckpoint(Runtime& runtime, const std::string& path);
  ~EmbeddedCheckpoint();
  EmbeddedCheckpoint(const EmbeddedCheckpoint&) = delete;
  EmbeddedCheckpoint& operator=(const EmbeddedCheckpoint&) = delete;

  CheckpointReader& reader() noexcept { return *reader_; }
  /// No newer one of its line of history lay beside it when it was opened.
  bool is_newest_of_line() const noexcept { return is_newest_of_line_; }
  /// What it has, as JSON.
  std::string description() const;
  /// Elements from `first` on, as many as `values` holds, in the tensor's type or widened to fp32.
  /// Errors: kInvalidArgument for what is not there; the reader's.
  void read(std::size_t tensor, std::uint64_t first, TypedSpan<std::byte> values);

 private:
  Runtime& runtime_;
  std::unique_ptr<IoEngine> io_;
  std::unique_ptr<CheckpointReader> reader_;
  bool is_newest_of_line_ = false;
};

}  // namespace ziggurat
