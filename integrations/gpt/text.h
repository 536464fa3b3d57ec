// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/text.h: training text as bytes, and which bytes a step sees.
//
// The whole text is held in memory: it is small beside a model's state. A step's batch is a
// function of (seed, step, micro-batch) alone, so a resumed run sees what the run that was never
// stopped would have seen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace ziggurat::gpt {

/// One micro-batch. `targets[i]` is the byte that follows `inputs[i]`. Row-major; a row is a
/// sequence.
struct Batch {
  std::vector<std::uint8_t> inputs;
  std::vector<std::uint8_t> targets;
};

class Text {
 public:
  /// Reads a file, or every regular file below a folder in the order of sorted paths (joined
  /// without a separator). The last 5 %, at least one sequence of `context` bytes, is held out.
  /// Errors: kInvalidArgument if the path is missing or is neither file nor folder, if the text is
  /// empty, or if it is shorter than two sequences.
  static Text load(const std::string& path, std::int64_t context);
  /// Takes bytes that are in memory; errors call them `name`.
  static Text from_bytes(std::vector<std::uint8_t> bytes, const std::string& name,
                         std::int64_t context);

  std::uint64_t size_bytes() const noexcept { return bytes_.size(); }
  /// Returns a hash that identifies the data, for EngineConfig::run_identity.
  std::uint64_t hash() const noexcept;

  struct Position {
    std::uint64_t seed;
    std::uint64_t step;   ///< from 0
    std::uint64_t micro;  ///< micro-batch of that step
  };
  /// Returns `batch` sequences; `position` draws the byte of the training part at which each
  /// starts.
  Batch training_batch(const Position& position, std::int64_t batch) const;
  /// Returns sequences `index * batch` to `(index + 1) * batch` of the held-out part, back to back;
  /// starts over at its end.
  Batch held_out_batch(std::uint64_t index, std::int64_t batch) const;
  /// Returns the number of sequences in the held-out part.
  std::uint64_t held_out_count() const noexcept;

 private:
  void append(Batch& batch, std::uint64_t start) const;

  std::vector<std::uint8_t> bytes_;
  std::int64_t context_ = 0;
  std::uint64_t training_bytes_ = 0;
};

}  // namespace ziggurat::gpt
