// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/checkpoint_folder.h: finds and removes checkpoints in a folder, which may have
// several lines of history.
//
//   FOLDER/step-000000010/           the line that saved this step first
//   FOLDER/step-000000010-1a2b3c4d/  another line (its first digits), because that name was taken
//
// A directory without a manifest is left over from a save or a removal that was cut off. A file
// `damaged` marks a checkpoint with damaged bytes: a resume that found them made the file. Entries
// with other names belong to somebody else, so they are not followed, read or removed.
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
/// Returns the directories with a checkpoint's name, whole or not, in ascending order, without
/// links. Empty if there is no folder.
std::vector<CheckpointEntry> checkpoint_entries(IoEngine& io, const std::string& folder);
/// Returns the checkpoints that have a manifest, without reading it.
std::vector<CheckpointEntry> whole_checkpoints(IoEngine& io, const std::string& folder);

/// What a checkpoint says of itself, and whether that can be true: checked by its manifest's own
/// hash and its files' sizes, but not by the files' bytes.
struct CheckpointFacts {
  CheckpointEntry entry;
  std::optional<StateLine> line;  ///< known even if only the manifest's first bytes can be read
  std::string model;
  std::string run_identity;
  int ranks = 1;                           ///< that saved it
  int tensor_parallel = 1;                 ///< how many of the ranks divided each layer
  std::optional<std::uint64_t> best_step;  ///< the run's best step when this was saved
  std::uint64_t size_bytes = 0;            ///< of its files
  bool readable = false;                   ///< the members above are known
  std::string flaw;                        ///< why the checkpoint cannot be used; empty if it can
  bool damaged = false;  ///< the flaw is the checkpoint's, not of the drive at this moment
  bool counts() const noexcept { return flaw.empty(); }
  std::optional<LineId> line_id() const { return line ? std::optional(line->id) : std::nullopt; }
};
/// Reads the facts of one checkpoint, or of all in a folder. Errors: those of a folder that cannot
/// be read; what is wrong with a single checkpoint becomes its flaw.
Task<CheckpointFacts> look_at_checkpoint(TextPlace place, std::string folder,
                                         CheckpointEntry entry);
Task<std::vector<CheckpointFacts>> look_at_checkpoints(TextPlace place, std::string folder);
/// Returns a checkpoint's line by the first bytes of its manifest; nothing if they name no line or
/// cannot be read.
Task<std::optional<LineId>> line_of_checkpoint(TextPlace place, std::string directory);

/// Returns true if the checkpoint `directory` has a line and no newer checkpoint of that line lies
/// beside it. A run that goes on from such a checkpoint continues the line.
Task<bool> is_newest_of_line(TextPlace place, std::string directory);

/// Marks a checkpoint as damaged; `why` is for people. The mark is durable when the Task ends.
Task<> mark_damaged(TextPlace place, std::string directory, std::string why);
/// Removes the mark of damage from a checkpoint that was put back or was only unreadable for a
/// while.
void unmark_damaged(IoEngine& io, const std::string& directory);

/// Returns `path` or, if it is a folder of checkpoints, the newest checkpoint of its newest line. A
/// newer checkpoint that cannot be read is returned instead, so that whoever opens it learns of it.
/// Errors: kInvalidArgument if there is no checkpoint, or if no line is the newest, naming the
/// lines.
Task<std::string> find_checkpoint(TextPlace place, std::string path);

/// Returns the lock that a process holds while it saves in the folder or removes something from it;
/// null if the filesystem has no locks. Errors: kUnavailable if another process holds the lock for
/// longer than `wait`; system errors.
std::unique_ptr<DirectFile> lock_checkpoints(TextPlace place, const std::string& folder,
                                             std::chrono::milliseconds wait);

/// Removes a checkpoint, or what is left of one. Its manifest is removed first, so that a
/// half-removed checkpoint is never taken for a whole one. Only files that a save makes are
/// removed, and a file that is gone already is no error. Returns what is left and why, for people,
/// instead of throwing an error; empty if nothing is left.
std::string remove_checkpoint(IoEngine& io, const std::string& directory);

}  // namespace ziggurat
