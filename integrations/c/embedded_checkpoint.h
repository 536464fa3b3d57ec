// SPDX-License-Identifier: Apache-2.0
// integrations/c/embedded_checkpoint.h: checkpoints of an embedder: the state of its engines and
// what else it has in memory, written by all ranks and read by any. The trainer's thread.
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

/// What is saved: read from an embedder's JSON text, with the objects beside it. In the text a part
/// is {"param": 3, "first": 128} for elements that follow one another, as many as the engine's
/// parameter or the memory has; {"param": 3, "offsets": [0, 8], "box": [4, 8]} for a box; or null
/// for what this rank does not save.
struct EmbeddedSave {
  struct Param {
    std::string name;
    std::vector<std::int64_t> shape;
    bool trained = true;                 ///< an engine of some rank has its state
    TensorType type = TensorType::kF32;  ///< the type of a parameter that is not trained
  };
  struct Part {
    std::size_t param = 0;  ///< of `params`
    TensorPiece part;       ///< without boxes if this rank saves nothing of it
  };
  struct Engine {
    EmbeddedEngine* engine;
    std::vector<Part> parts;  ///< one for each of the engine's parameters
  };
  struct Values {
    Part part;
    TypedSpan<const std::byte> memory;
  };
  /// What the engine of another rank has, which this rank reads there.
  struct Other {
    std::size_t engine;  ///< of `engines`
    int rank;
    std::string name;  ///< the parameter's name on that rank
    Part part;
  };

  std::string folder;
  Retention retention;
  StateContent content;       ///< all except its state, units and tensors
  std::vector<Param> params;  ///< all of the model, the same on every rank
  std::vector<Engine> engines;
  std::vector<Values> values;
  /// What a save beside steps may cost: how long they wait for it in all, how fast it is written
  /// (0: no limit), and the memory that it may take for records which a step would change.
  double stall_max_s = EngineConfig::Checkpoint{}.stall_max_s;
  std::uint64_t bandwidth_bytes_per_s = 0;
  std::uint64_t spare_bytes = 0;
  bool widened = false;  ///< saves codes of 8 bits as the values that they stand for
  bool alone = false;    ///< only this rank calls, and saves `others` too
  std::vector<Other> others;

  /// Reads `text`. Errors: kInvalidArgument naming what is wrong with it, or what does not fit
  /// `engines` or `memory`.
  static EmbeddedSave parse(std::string_view text, std::span<EmbeddedEngine* const> engines,
                            std::span<const TypedSpan<std::byte>> memory);
};

/// Parts of a checkpoint that an engine's parameters are, and the steps that each has made.
struct EmbeddedParts {
  std::vector<TensorPiece> parts;
  std::vector<std::uint64_t> steps;
  bool weights_only = false;

  /// Reads {"parts": [{"name": .., "shape": [..], "first": 0} or with "offsets", "box"], "steps":
  /// [..], "weights_only": false}. `counts` has the number of elements of each parameter. Errors:
  /// kInvalidArgument.
  static EmbeddedParts parse(std::string_view text, std::span<const std::uint64_t> counts);
};

/// A checkpoint that is open for reading.
class EmbeddedCheckpoint {
 public:
  /// Opens the checkpoint `path`, or the newest one in that folder. Errors: those of
  /// CheckpointReader.
  EmbeddedCheckpoint(Runtime& runtime, const std::string& path);
  ~EmbeddedCheckpoint();
  EmbeddedCheckpoint(const EmbeddedCheckpoint&) = delete;
  EmbeddedCheckpoint& operator=(const EmbeddedCheckpoint&) = delete;

  CheckpointReader& reader() noexcept { return *reader_; }
  /// Returns true if no newer checkpoint of its line lay beside it when it was opened.
  bool is_newest_of_line() const noexcept { return is_newest_of_line_; }
  /// Describes the checkpoint as JSON.
  std::string description() const;
  /// Reads elements from `first` on, as many as `values` holds, in the tensor's type or widened to
  /// fp32. Errors: kInvalidArgument for a tensor, elements or a type that cannot be read; those of
  /// the reader.
  void read(std::size_t tensor, std::uint64_t first, TypedSpan<std::byte> values);

 private:
  Runtime& runtime_;
  std::unique_ptr<IoEngine> io_;
  std::unique_ptr<CheckpointReader> reader_;
  bool is_newest_of_line_ = false;
};

}  // namespace ziggurat
