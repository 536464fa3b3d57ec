// SPDX-License-Identifier: Apache-2.0
// integrations/cli/ckpt_prune.cc: `ziggurat ckpt prune`, which removes old checkpoints of one line
// of history. It may run beside a training run, because it waits until none is saving.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>

#include "base/bytes.h"
#include "base/error.h"
#include "core/checkpoint/checkpoint_folder.h"
#include "core/checkpoint/line_history.h"
#include "core/engine/runtime.h"
#include "integrations/cli/commands.h"
#include "integrations/cli/console.h"

namespace ziggurat::cli {
namespace {

/// The time for which prune waits for a save that is under way.
constexpr std::chrono::seconds kLockWait{10};

std::string all_lines(const std::vector<const LineOfCheckpoints*>& lines) {
  std::vector<std::string> texts;
  for (const LineOfCheckpoints* const line : lines) texts.push_back(line->description());
  return fmt::format("{}", fmt::join(texts, "; "));
}

/// Returns the line of history that the command means; null if the folder has no checkpoint.
/// Errors: kInvalidArgument if no line or several lines fit.
const LineOfCheckpoints* chosen(const LineHistory& history, const CkptCommand& command) {
  const std::string& folder = command.paths.at(0);
  std::vector<const LineOfCheckpoints*> fit;
  if (command.line.empty()) {
    fit = history.newest();
    if (fit.empty()) return nullptr;
  } else {
    for (const LineOfCheckpoints& line : history.lines()) {
      const bool is_it =
          line.id ? to_text(*line.id).starts_with(command.line) : command.line == "none";
      if (is_it) fit.push_back(&line);
    }
  }
  if (fit.size() == 1) return fit.front();
  std::vector<const LineOfCheckpoints*> all;
  for (const LineOfCheckpoints& line : history.lines()) all.push_back(&line);
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("ckpt prune {}: {} lines of history {}; choose one with --line: {}",
                          folder, fit.size(),
                          command.line.empty()     ? "could be meant"
                          : command.line == "none" ? "have no name"
                                                   : "begin with " + command.line,
                          all_lines(all)));
}

/// A line between two others is what says that the later one goes on from the earlier one.
void check_removable(const LineHistory& history, const LineOfCheckpoints& line,
                     const std::string& folder) {
  const std::optional<LineId> earlier = history.left_by(line);
  const std::optional<LineId> later = history.that_left(line);
  if (!earlier || !later) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("ckpt prune {}: without line {} nothing would say that line {} goes on "
                          "from line {}; remove line {} first",
                          folder, short_text(*line.id), short_text(*later), short_text(*earlier),
                          short_text(*earlier)));
}

/// Returns the checkpoints that `command` removes. A whole line includes those of which only the
/// line can be read.
std::vector<CheckpointEntry> going(const std::vector<CheckpointFacts>& all,
                                   const LineOfCheckpoints& line, const CkptCommand& command) {
  std::vector<CheckpointEntry> gone;
  if (command.keep_last == 0) {
    for (const CheckpointFacts& its : all) {
      if (its.line_id() == line.id && (its.readable || line.id)) gone.push_back(its.entry);
    }
    return gone;
  }
  const auto newest = std::find_if(line.checkpoints.rbegin(), line.checkpoints.rend(),
                                   [](const CheckpointFacts& its) { return its.counts(); });
  if (newest == line.checkpoints.rend()) return gone;
  const Retention retention{.keep_last = *command.keep_last,
                            .keep_every = command.keep_every,
                            .keep_best = command.keep_best};
  return expired(line.checkpoints, retention, *newest);
}

Task<> prune(Runtime& runtime, const CkptCommand& command, Console& console) {
  const std::string& folder = command.paths.at(0);
  const auto io = runtime.io_engine(runtime.reactor, folder);
  const TextPlace place{.reactor = runtime.reactor, .io = *io};
  const auto lock = lock_checkpoints(place, folder, kLockWait);
  Task<std::vector<CheckpointFacts>> looking = look_at_checkpoints(place, folder);
  const std::vector<CheckpointFacts> all = co_await std::move(looking);
  const LineHistory history(all);
  for (const CheckpointFacts& its : all) {
    if (its.counts()) continue;
    const bool in_line = its.readable || its.line;  // --line finds it
    console.line(fmt::format(
        "{}/{} is not usable, and stays unless {}: {}", folder, its.entry.name,
        in_line ? "its whole line of history is removed" : "you remove the directory", its.flaw));
  }
  const LineOfCheckpoints* const line = chosen(history, command);
  std::size_t removed = 0;
  if (line != nullptr) {
    if (command.keep_last == 0) check_removable(history, *line, folder);
    for (const CheckpointEntry& entry : going(all, *line, command)) {
      const std::string directory = folder + "/" + entry.name;
      const std::string left = remove_checkpoint(*io, directory);
      console.line(left.empty() ? "removed " + directory : left);
      if (left.empty()) ++removed;
    }
    if (removed > 0) io->sync_directory(folder);
  }
  const std::size_t stay = all.size() - removed;
  console.line(fmt::format("{}: {} checkpoint{}", folder, stay, stay == 1 ? " stays" : "s stay"));
}

}  // namespace

int ckpt_prune(const CkptCommand& command) {
  if (!command.keep_last) {
    throw UsageError(
        "ckpt prune: the number of checkpoints to keep is missing; give --keep-last N");
  }
  if (command.keep_last == 0 && command.line.empty())
    throw UsageError("ckpt prune: --keep-last 0 removes a whole line; name it with --line");
  if (command.keep_last == 0 && (command.keep_every > 0 || command.keep_best)) {
    throw UsageError(
        "ckpt prune: --keep-last 0 removes a whole line, so --keep-every and --keep-best would "
        "keep nothing; leave them out, or give --keep-last 1");
  }
  const std::string& folder = command.paths.at(0);
  if (!std::filesystem::exists(folder)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} does not exist, so it holds no checkpoints", folder), ENOENT);
  }
  Console console;
  const auto runtime = Runtime::create({.threads = 0, .trace_path = ""});
  runtime->reactor.block_on(prune(*runtime, command, console));
  return 0;
}

}  // namespace ziggurat::cli
