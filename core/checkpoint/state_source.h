// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/state_source.h: state by name: where it is read from and written to, whatever
// holds it and however it is divided.
//
// Readers and writers exchange runs: elements of a tensor that follow one another, counted in the
// whole tensor in row-major order. The reader says which runs it wants and where in its array each
// begins; the source knows in which files they lie. Reactor's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/runtime/async.h"
#include "core/checkpoint/state_content.h"

namespace ziggurat {

/// Elements [first, first + count) of a tensor, which lie at [at, at + count) of an array.
struct TensorRun {
  std::uint64_t first;
  std::uint64_t count;
  std::uint64_t at;
};

class StateSource {
 public:
  virtual ~StateSource() = default;
  virtual const StateContent& content() const noexcept = 0;
  /// Reads `runs` of tensor `tensor` of content() into `array`, and compares them with their hash
  /// if the source has hashes. Any number of reads may be under way. Errors: kDataLoss naming the
  /// file and the tensor; system errors.
  virtual Task<> read(std::size_t tensor, std::span<const TensorRun> runs,
                      std::span<std::byte> array) = 0;
  /// Returns the directory or the file, for messages.
  virtual std::string place() const = 0;
};

class StateSink {
 public:
  virtual ~StateSink() = default;
  /// Takes `runs` of tensor `tensor` from `array`. They replace what was given before for the same
  /// elements. Errors: system errors, naming the file.
  virtual Task<> write(std::size_t tensor, std::span<const TensorRun> runs,
                       std::span<const std::byte> array) = 0;
  /// Returns how many bytes after a multiple of AlignedBytes::kAlignment an array should begin
  /// whose first value is element `first` of `tensor`. Then it is written from where it lies, and
  /// not copied first.
  virtual std::uint64_t lead_bytes(std::size_t tensor, std::uint64_t first) const = 0;
};

}  // namespace ziggurat
