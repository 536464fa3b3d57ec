// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/manifest.h: `manifest.json`, which describes a checkpoint directory: what it has,
// in which file each piece of each tensor lies, and the hash of every byte.
//
// Whoever reads a checkpoint believes only the manifest; headers of shards are for other tools. A
// text that to_text() cannot have written is refused before memory is reserved by its numbers.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/checkpoint/state_content.h"
#include "core/checkpoint/tensor_box.h"

namespace ziggurat {

/// Most bytes that are hashed together: a reader holds all of them to prove any one.
inline constexpr std::uint64_t kHashedBytesMax = std::uint64_t{4} << 20;

/// The next `size_bytes` of a piece, and their hash.
struct HashedBytes {
  std::uint64_t size_bytes = 0;
  std::uint64_t hash = 0;  ///< hash64() under seed 0
  friend bool operator==(const HashedBytes&, const HashedBytes&) = default;
};

/// A box of a tensor, stored row by row in one file.
struct StatePiece {
  std::uint32_t tensor = 0;        ///< of StateContent::tensors
  std::uint32_t file = 0;          ///< of Manifest::files
  std::uint64_t offset_bytes = 0;  ///< in the file
  TensorBox box;
  std::vector<HashedBytes> hashed;  ///< all bytes of the piece, in order
  friend bool operator==(const StatePiece&, const StatePiece&) = default;
};

struct StateFile {
  std::string name;  ///< name in the checkpoint's directory, never a path
  std::uint64_t size_bytes = 0;
  std::uint64_t header_bytes = 0;  ///< bytes before the first tensor
  std::uint64_t header_hash = 0;   ///< of those
  friend bool operator==(const StateFile&, const StateFile&) = default;
};

struct Manifest {
  static constexpr std::string_view kFileName = "manifest.json";
  static constexpr std::uint64_t kSchema = 1;
  /// Longest text that is read: a checkpoint of 10 TB has about 100 MB.
  static constexpr std::uint64_t kTextBytesMax = std::uint64_t{1} << 30;

  StateContent content;
  std::vector<StateFile> files;
  std::vector<StatePiece> pieces;
  friend bool operator==(const Manifest&, const Manifest&) = default;
};

/// Names that StateContent::resume must have before a run can go on elsewhere as if nothing had
/// happened. `verify` names the missing ones. "loss_scale" and "best_metric" may be null.
inline constexpr std::array<std::string_view, 10> kResumeNames{
    "schedule",    "loss_scale", "consumed_samples", "consumed_tokens", "data_cursor", "rng",
    "best_metric", "data",       "evaluation",       "tokenizer"};
std::vector<std::string> missing_resume_names(const StateContent& content);
/// Returns the "step" in "best_metric", if it has one.
std::optional<std::uint64_t> best_step(const StateContent& content);

/// files_text() writes the files and pieces of one rank alone, and add_files() adds such a text to
/// the manifest of others. Errors: kDataLoss naming `place`.
std::string files_text(const Manifest& manifest);
void add_files(Manifest& manifest, std::string_view text, const std::string& place);

/// Returns canonical JSON with a checksum of itself in its first line. Errors: kInvalidArgument,
/// naming what is wrong, for content that parse_manifest() would refuse.
std::string to_text(const Manifest& manifest);
/// Reads and checks a manifest. `place` says in messages where the text is from. Errors: kDataLoss,
/// saying what is wrong with which tensor or file: the checksum, a schema, names that leave the
/// directory or repeat, pieces that overlap, leave their file or do not cover their tensor, sizes
/// that do not agree.
Manifest parse_manifest(std::string_view text, const std::string& place);

/// What a manifest says, without its pieces, which are most of it. The text was checked by its
/// checksum, but not by the rules of a manifest.
struct ManifestSummary {
  StateContent content;
  std::vector<StateFile> files;
};
/// Errors: kDataLoss.
ManifestSummary summarize_manifest(std::string_view text, const std::string& place);
/// Returns the line that a manifest names in its first kManifestHeadBytes; nothing if it names
/// none. The text is not checked by its checksum.
inline constexpr std::uint64_t kManifestHeadBytes = 4096;
std::optional<StateLine> line_in(std::string_view head, const std::string& place);

}  // namespace ziggurat
