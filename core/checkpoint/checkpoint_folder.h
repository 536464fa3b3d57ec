// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/checkpoint_folder.h: what lies in a folder of checkpoints, of how many lines of
// history, and what of it may be removed.
//
//   FOLDER/step-000000010/           of whichever line came first
//   FOLDER/step-000000010-1a2b3c4d/  of another line (its first digits), where that name was taken
//
// A directory without a manifest is what a save or a removal left that was cut off. One with a file
// `damaged` has bytes that are not what was written: a resume that found that out says so there.
// What has other names was put there by somebody else: it is not followed, read or removed.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "aio/text_file.h"
#include "core/checkpoint/state_line.h"

namespace ziggurat {

/// "step-000000010", and "step-000000010-1a2b3c4d".
std::string checkpoint_name(std::uint64_t step);
std::string checkpoint_name(std::uint64_t step, const LineId& line);

struct CheckpointEntry {
  std::uint64_t step = 0;
  std::string name;
  friend auto operator<=>(const CheckpointEntry&, const CheckpointEntry&) = default;
};
/// The directories with a checkpoint's name, whole or not, ascending; a link to one is none. None
/// where there is no folder.
std::vector<CheckpointEntry> checkpoint_entries(IoEngine& io, const std::string& folder);
/// Those that have a manifest, which is not read.
std::vector<CheckpointEntry> whole_checkpoints(IoEngine& io, const std::string& folder);

/// What a checkpoint says of itself, and whether it can be what it says: by its manifest's own hash
/// and its files' sizes, not by their bytes.
struct CheckpointFacts {
  CheckpointEntry entry;
  std::optional<StateLine> line;  ///< also where only the manifest's first bytes can be read
  std::string model;
  std::string run_identity;
  int ranks = 1;                           ///< that saved it
  int tensor_parallel = 1;                 ///< of those, that divided each layer
  std::optional<std::uint64_t> best_step;  ///< of the run, when this was saved
  std::uint64_t size_bytes = 0;            ///< of its files
  bool readable = false;                   ///< the above is known
  std::string flaw;                        ///< why it does not count; empty: it does
  bool counts() const noexcept { return flaw.empty(); }
  std::optional<LineId> line_id() const { return line ? std::optional(line->id) : std::nullopt; }
};
/// Errors: those of a folder that cannot be read; what a single checkpoint has is its flaw.
Task<CheckpointFacts> look_at_checkpoint(TextPlace place, std::string folder,
                                         CheckpointEntry entry);
Task<std::vector<CheckpointFacts>> look_at_checkpoints(TextPlace place, std::string folder);
/// By the first bytes of its manifest alone; nothing where they name none, or cannot be read.
Task<std::optional<LineId>> line_of_checkpoint(TextPlace place, std::string directory);

/// The checkpoint `directory` has a line, and no newer one of it lies beside it: who goes on from
/// it continues the line.
Task<bool> is_newest_of_line(TextPlace place, std::string directory);

/// The mark of damage: `why`, for people. Durable when it returns.
Task<> mark_damaged(TextPlace place, std::string directory, std::string why);
/// Removes the mark: the checkpoint was put back, or had only been unreadable for a while.
void unmark_damaged(IoEngine& io, const std::string& directory);

/// `path`, or if that is a folder of checkpoints, the newest of its newest line; a newer one that
/// cannot be read goes before it, so that whoever opens it hears of it. Errors: kInvalidArgument
/// where there is none, or no line is the newest, naming them.
Task<std::string> find_checkpoint(TextPlace place, std::string path);

/// Held by whoever saves in the folder or removes something of it; none where the filesystem has no
/// locks. Errors: kUnavailable where another process has it for longer than `wait`; errno's.
std::unique_ptr<DirectFile> lock_checkpoints(TextPlace place, const std::string& folder,
                                             std::chrono::milliseconds wait);

/// Removes a checkpoint, or what is left of one: its manifest first, so that no half one is ever
/// taken for whole. Only files that a save makes are; a name that is gone is done. Returns what is
/// left and why, for people: nothing else is an error here. Nothing left: empty.
std::string remove_checkpoint(IoEngine& io, const std::string& directory);

}  // namespace ziggurat
