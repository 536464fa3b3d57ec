// SPDX-License-Identifier: Apache-2.0
// integrations/cli/newest_checkpoint.cc: rank 0 names a checkpoint, and every rank verifies its
// share of it.
#include "integrations/cli/newest_checkpoint.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>

#include "base/error.h"
#include "integrations/cli/checkpoint_files.h"

namespace ziggurat::cli {
namespace {

/// Bytes that each rank reads before the ranks exchange what they found. So damage that one rank
/// finds stops all, and no rank is taken for dead.
constexpr std::uint64_t kRankBytesAtOnce = std::uint64_t{1} << 30;
constexpr std::size_t kTextMax = 1024;

std::uint64_t size_of(const StatePiece& piece) {
  std::uint64_t total = 0;
  for (const HashedBytes& hashed : piece.hashed) total += hashed.size_bytes;
  return total;
}

void set_text(std::array<char, kTextMax>& to, const std::string& text) {
  std::copy_n(text.begin(), std::min(text.size(), to.size() - 1), to.begin());
}

/// Returns rank 0's text on every rank, or throws rank 0's error on every rank.
std::string said_by_first(TrainRanks& ranks, const std::string& own,
                          const std::optional<Error>& error) {
  struct Said {
    std::array<char, kTextMax> text{};
    ErrorCode code{};
    std::uint8_t is_error = 0;
  } said;
  set_text(said.text, error ? error->what() : own);
  said.is_error = error ? 1 : 0;
  if (error) said.code = error->code();
  said = ranks.all(said).front();
  if (said.is_error != 0) throw Error(said.code, said.text.data());
  return said.text.data();
}

}  // namespace

/// Reads the list of the folder's checkpoints once. Only rank 0 calls it.
void NewestCheckpoint::look() {
  if (all_) return;
  all_ = runtime_.reactor.block_on(
      [](Runtime& runtime, const std::string& folder) -> Task<std::vector<CheckpointFacts>> {
        const auto io = runtime.io_engine(runtime.reactor, folder);
        Task<std::vector<CheckpointFacts>> looking =
            look_at_checkpoints({.reactor = runtime.reactor, .io = *io}, folder);
        co_return co_await std::move(looking);
      }(runtime_, folder_));
}

std::optional<NewestCheckpoint::Found> NewestCheckpoint::newer(const StateLine& line,
                                                               std::uint64_t step) {
  std::vector<CheckpointFacts> left;
  std::optional<Error> error;
  try {
    if (ranks_.first()) look();
  } catch (const Error& failed) {
    error = failed;
  }
  for (const CheckpointFacts& its : all_.value_or(std::vector<CheckpointFacts>())) {
    const bool perhaps = !its.readable && !its.line;
    if (its.entry.step > step && (perhaps || its.line_id() == line.id)) left.push_back(its);
  }
  std::ranges::sort(left, std::greater{}, &CheckpointFacts::entry);
  return first_that_verifies(left, error, false);
}

std::optional<NewestCheckpoint::Found> NewestCheckpoint::newest(
    const std::optional<StateLine>& line) {
  std::vector<CheckpointFacts> left;
  std::optional<Error> error;
  try {
    if (ranks_.first()) left = candidates(line);
  } catch (const Error& failed) {
    error = failed;
  }
  std::optional<Found> found = first_that_verifies(left, error, true);
  if (found && line && ranks_.first()) {
    const bool of_it = std::ranges::any_of(left, [&](const CheckpointFacts& its) {
      return folder_ + "/" + its.entry.name == found->directory && its.line_id() == line->id;
    });
    found->continues_line = found->continues_line && of_it;
  }
  if (found) {
    const auto own = static_cast<std::uint8_t>(found->continues_line ? 1 : 0);
    found->continues_line = ranks_.all(own).front() != 0;
  }
  return found;
}

/// Returns the checkpoints of `line`, or of the run's newest line if `line` is not known; newest
/// first.
std::vector<CheckpointFacts> NewestCheckpoint::candidates(const std::optional<StateLine>& line) {
  look();
  std::vector<CheckpointFacts> own;
  std::string difference;
  for (const CheckpointFacts& its : *all_) {
    const std::string other = its.readable ? differs_(its) : "";
    if (other.empty()) {
      own.push_back(its);
    } else {  // the difference of the newest is reported
      difference = fmt::format("{}/{}: {}", folder_, its.entry.name, other);
    }
  }
  if (own.empty() && !difference.empty()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "{}. All checkpoints in this folder belong to other runs; give the settings of the run "
            "to continue, or begin a new run with --resume never or another --checkpoint-dir",
            difference));
  }
  const LineHistory history(own);
  if (line) return history.of(line);
  const std::vector<const LineOfCheckpoints*> newest = history.newest();
  if (newest.size() > 1) {
    std::vector<std::string> lines;
    for (const LineOfCheckpoints* const its : newest) lines.push_back(its->description());
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "{} has checkpoints of several lines of this run, and no store says which of them "
            "continues: {}. Name a checkpoint with --load, begin a new run with --resume never, or "
            "remove a line with `ziggurat ckpt prune {} --line ID --keep-last 0`",
            folder_, fmt::join(lines, "; "), folder_));
  }
  if (newest.empty()) return history.of(std::nullopt);
  const LineOfCheckpoints& its = *newest.front();
  if (!its.id) return history.of(std::nullopt);
  return history.of(
      StateLine{.id = *its.id, .epoch = 0, .parent = its.parent, .left_at = its.left_at});
}

/// Returns the first checkpoint of rank 0's `left` that verifies, if there is one. Throws rank 0's
/// `error` on every rank, and kDataLoss if `must` and `left` has checkpoints of which none
/// verifies.
std::optional<NewestCheckpoint::Found> NewestCheckpoint::first_that_verifies(
    const std::vector<CheckpointFacts>& left, const std::optional<Error>& error, bool must) {
  for (std::size_t tried = 0;; ++tried) {
    const std::string own = tried < left.size() ? left[tried].entry.name : "";
    const std::string name = said_by_first(ranks_, own, error);
    if (name.empty() && (tried == 0 || !must)) return std::nullopt;
    if (name.empty()) {
      throw Error(
          ErrorCode::kDataLoss,
          fmt::format("none of the checkpoints in {} verifies; restore one from a copy, or begin a "
                      "new run with `resume=never` and another directory for checkpoints",
                      folder_));
    }
    const std::string directory = folder_ + "/" + name;
    if (!verifies(directory)) continue;
    unmark(directory);
    return Found{.directory = directory, .continues_line = tried == 0};
  }
}

void NewestCheckpoint::say_others(const StateLine& own) {
  if (!ranks_.first()) return;
  try {
    look();
  } catch (const Error& error) {  // a failed report must not end the run
    return console_.line(
        fmt::format("  the checkpoints in {} cannot be listed: {}", folder_, error.what()));
  }
  const LineHistory history(*all_);
  for (const LineOfCheckpoints& line : history.lines()) {
    if (line.id == own.id) continue;
    const bool other_run = std::ranges::any_of(
        line.checkpoints, [&](const CheckpointFacts& its) { return !differs_(its).empty(); });
    std::string why = "which this run does not continue";
    if (other_run) {
      why = "which belongs to another run";
    } else if (line.id && own.parent == line.id) {
      why = fmt::format("which this run left at step {} and does not continue", own.left_at);
    }
    // A line between two others is what says that the later one goes on from the earlier one.
    const bool between = history.left_by(line) && history.that_left(line);
    const std::string removal =
        between ? ""
                : fmt::format(" (`ziggurat ckpt prune {} --line {} --keep-last 0` removes them)",
                              folder_, line.id ? short_text(*line.id) : "none");
    console_.line(fmt::format("  {} has {}, {}; its checkpoints stay{}", folder_,
                              line.description(), why, removal));
  }
}

/// Marks a checkpoint as damaged, if this process may write there. A process that may not write
/// there cannot remove anything there either.
void NewestCheckpoint::mark(const std::string& directory, const std::string& why) {
  if (!ranks_.first()) return;
  try {
    runtime_.reactor.block_on(
        [](Runtime& runtime, const std::string& in, const std::string& reason) -> Task<> {
          const auto io = runtime.io_engine(runtime.reactor, in);
          Task<> marking = mark_damaged({.reactor = runtime.reactor, .io = *io}, in, reason);
          co_await std::move(marking);
        }(runtime_, directory, why));
  } catch (const Error& error) {
    console_.line(fmt::format("  {} cannot be marked as damaged: {}", directory, error.what()));
  }
}

void NewestCheckpoint::unmark(const std::string& directory) {
  if (!ranks_.first()) return;
  try {
    runtime_.reactor.block_on([](Runtime& runtime, const std::string& in) -> Task<> {
      const auto io = runtime.io_engine(runtime.reactor, in);
      unmark_damaged(*io, in);
      co_return;
    }(runtime_, directory));
  } catch (const Error& error) {
    console_.line(
        fmt::format("  the mark of damage in {} cannot be removed: {}", directory, error.what()));
  }
}

/// Reports and marks the damage that any rank found. Returns, alike on all ranks, whether there was
/// any.
bool NewestCheckpoint::damaged(const std::string& directory, const std::optional<Error>& damage) {
  struct Fault {
    std::array<char, kTextMax> text{};
    std::uint8_t lost = 0;
  } own;
  if (damage) {
    set_text(own.text, damage->what());
    own.lost = damage->code() == ErrorCode::kDataLoss ? 1 : 0;
  }
  for (const Fault& its : ranks_.all(own)) {
    if (its.text[0] == 0) continue;
    console_.line(
        fmt::format("  {} does not verify and is passed over: {}", directory, its.text.data()));
    if (its.lost != 0) mark(directory, its.text.data());
    return true;
  }
  return false;
}

bool NewestCheckpoint::verifies(const std::string& directory) {
  std::unique_ptr<CheckpointFiles> files;
  const auto damage_of = [](const std::function<void()>& work) -> std::optional<Error> {
    try {
      work();
    } catch (const Error& error) {
      return error;
    }
    return std::nullopt;
  };
  const std::optional<Error> unreadable =
      damage_of([&] { files = std::make_unique<CheckpointFiles>(runtime_, directory); });
  if (damaged(directory, unreadable)) return false;
  CheckpointReader& reader = *files->checkpoint();
  const std::vector<StatePiece>& pieces = reader.manifest().pieces;
  std::uint64_t total = 0;
  for (const StatePiece& piece : pieces) total += size_of(piece);
  const std::uint64_t at_once = kRankBytesAtOnce * static_cast<std::uint64_t>(ranks_.count());
  std::uint64_t done = 0;
  for (std::size_t first = 0, end = 0; first < pieces.size() || first == 0; first = end) {
    std::uint64_t bytes = 0;
    while (end < pieces.size() && (end == first || bytes < at_once))
      bytes += size_of(pieces[end++]);
    const std::optional<Error> damage =
        damage_of([&] { runtime_.reactor.block_on(prove_share(reader, first, end)); });
    if (damaged(directory, damage)) return false;
    done += bytes;
    console_.progress("verifying the checkpoint", done, total);
    if (end == first) break;  // there are no pieces
  }
  return true;
}

/// Verifies this rank's share of the pieces [first, end); the first call also verifies its share of
/// the headers.
Task<> NewestCheckpoint::prove_share(CheckpointReader& reader, std::size_t first, std::size_t end) {
  const auto ranks = static_cast<std::size_t>(ranks_.count());
  const auto own = static_cast<std::size_t>(ranks_.rank());
  const Manifest& manifest = reader.manifest();
  for (std::size_t f = own; first == 0 && f < manifest.files.size(); f += ranks)
    co_await reader.prove_header(f);
  for (std::size_t p = first; p < end; ++p) {
    if (p % ranks == own) co_await reader.prove(manifest.pieces[p]);
  }
}

}  // namespace ziggurat::cli
