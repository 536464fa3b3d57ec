// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/checkpoint_folder.cc: finds, reads, marks and removes the checkpoints of a
// folder.
#include "core/checkpoint/checkpoint_folder.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <functional>
#include <utility>

#include "base/error.h"
#include "core/checkpoint/line_history.h"
#include "core/checkpoint/manifest.h"

namespace ziggurat {
namespace {

constexpr std::string_view kNameBegin = "step-";
constexpr std::string_view kMark = "damaged";
constexpr std::string_view kPart = ".part";  // of write_text()

std::string path_of(const std::string& directory, std::string_view name) {
  return fmt::format("{}/{}", directory, name);
}

/// Returns what follows `prefix` and digits; nothing if `text` does not begin with them.
std::optional<std::string_view> after_number(std::string_view text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return std::nullopt;
  text.remove_prefix(prefix.size());
  const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  if (digits == 0) return std::nullopt;
  return text.substr(digits);
}

/// As plan_shards() calls them.
bool is_shard(std::string_view name) {
  std::optional<std::string_view> rest = after_number(name, "rank-");
  if (rest) rest = after_number(*rest, "-of-");
  if (rest) rest = after_number(*rest, "-");
  return rest == ".safetensors";
}

bool is_ours(std::string_view name) {
  if (is_shard(name)) return true;
  if (name.ends_with(kPart)) name.remove_suffix(kPart.size());
  return name == Manifest::kFileName || name == kMark;
}

std::optional<CheckpointEntry> entry_of(const std::string& name) {
  if (!name.starts_with(kNameBegin)) return std::nullopt;
  std::uint64_t step = 0;
  const char* const end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(name.data() + kNameBegin.size(), end, step);
  if (error != std::errc{}) return std::nullopt;
  const std::string plain = checkpoint_name(step);
  const bool of_line =
      name.size() == plain.size() + 9 && name.starts_with(plain + "-") &&
      name.find_first_not_of("0123456789abcdef", plain.size() + 1) == std::string::npos;
  if (name != plain && !of_line) return std::nullopt;
  return CheckpointEntry{.step = step, .name = name};
}

/// Returns true for a link, which may be left where an archive was moved away. Asks the filesystem
/// itself, because drives that are not on it have none.
bool is_link(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_symlink(path, ignored);
}

std::uint64_t file_bytes(IoEngine& io, const std::string& path) {
  const FileHandle file = io.open(path, {.direct = false});
  const std::uint64_t size = io.file_size_bytes(file);
  io.close(file);
  return size;
}

/// Reads what the manifest says into `facts`. Throws an error that says what is wrong with the
/// checkpoint.
void take_facts(IoEngine& io, const std::string& directory, const std::string& text,
                CheckpointFacts& facts) {
  const ManifestSummary its = summarize_manifest(text, path_of(directory, Manifest::kFileName));
  facts.line = its.content.line;
  facts.model = its.content.model;
  facts.run_identity = its.content.run_identity;
  facts.ranks = its.content.layout.ranks;
  facts.tensor_parallel = its.content.layout.tensor_parallel;
  facts.best_step = best_step(its.content);
  facts.readable = true;
  for (const StateFile& file : its.files) facts.size_bytes += file.size_bytes;
  for (const StateFile& file : its.files) {
    const std::uint64_t found = file_bytes(io, path_of(directory, file.name));
    if (found == file.size_bytes) continue;
    throw Error(ErrorCode::kDataLoss, fmt::format("{}/{} has {} bytes, but {} were written",
                                                  directory, file.name, found, file.size_bytes));
  }
  if (io.exists(path_of(directory, kMark))) {
    throw Error(ErrorCode::kDataLoss,
                fmt::format("a run that read {} found it damaged, as its file '{}' says", directory,
                            kMark));
  }
}

}  // namespace

std::string checkpoint_name(std::uint64_t step) { return fmt::format("{}{:09}", kNameBegin, step); }

std::string checkpoint_name(std::uint64_t step, const LineId& line) {
  return fmt::format("{}-{}", checkpoint_name(step), short_text(line));
}

std::vector<CheckpointEntry> checkpoint_entries(IoEngine& io, const std::string& folder) {
  std::vector<CheckpointEntry> entries;
  std::vector<std::string> names;
  try {
    names = io.names_in(folder);
  } catch (const Error& error) {
    if (error.native() != ENOENT) throw;
  }
  for (const std::string& name : names) {
    std::optional<CheckpointEntry> entry = entry_of(name);
    if (entry && !is_link(path_of(folder, name))) entries.push_back(*std::move(entry));
  }
  std::ranges::sort(entries);
  return entries;
}

std::vector<CheckpointEntry> whole_checkpoints(IoEngine& io, const std::string& folder) {
  std::vector<CheckpointEntry> entries = checkpoint_entries(io, folder);
  std::erase_if(entries, [&](const CheckpointEntry& entry) {
    return !io.exists(path_of(path_of(folder, entry.name), Manifest::kFileName));
  });
  return entries;
}

namespace {

/// Reads the line from the first bytes of the manifest, even if the rest is damaged.
Task<std::optional<StateLine>> line_by_head(TextPlace place, std::string directory) {
  const std::string path = path_of(directory, Manifest::kFileName);
  try {
    std::unique_ptr<DirectFile> file;
    const std::function<void()> open = [&] {
      file = DirectFile::open(place.reactor, place.io, path, {.direct = false}, place.observers);
    };
    co_await place.calls.run(place.reactor, open);
    std::string head(std::min(file->size_bytes(), kManifestHeadBytes), '\0');
    co_await file->read(0, std::as_writable_bytes(std::span(head)));
    co_return line_in(head, path);
  } catch (const Error&) {
    // The cause is not reported: whoever wants to know it reads the whole manifest.
  }
  co_return std::nullopt;
}

}  // namespace

Task<CheckpointFacts> look_at_checkpoint(TextPlace place, std::string folder,
                                         CheckpointEntry entry) {
  CheckpointFacts facts;
  facts.entry = entry;
  const std::string directory = path_of(folder, entry.name);
  try {
    const std::string text =
        co_await read_text(place, path_of(directory, Manifest::kFileName), Manifest::kTextBytesMax);
    const std::function<void()> take = [&] { take_facts(place.io, directory, text, facts); };
    co_await place.calls.run(place.reactor, take);
  } catch (const Error& error) {
    facts.flaw = error.what();
    facts.damaged = error.code() == ErrorCode::kDataLoss || error.native() == ENOENT;
  }
  if (!facts.readable) facts.line = co_await line_by_head(place, directory);
  co_return facts;
}

Task<std::vector<CheckpointFacts>> look_at_checkpoints(TextPlace place, std::string folder) {
  std::vector<CheckpointEntry> entries;
  const std::function<void()> list = [&] { entries = whole_checkpoints(place.io, folder); };
  co_await place.calls.run(place.reactor, list);
  std::vector<CheckpointFacts> all;
  for (const CheckpointEntry& entry : entries)
    all.push_back(co_await look_at_checkpoint(place, folder, entry));
  co_return all;
}

Task<std::optional<LineId>> line_of_checkpoint(TextPlace place, std::string directory) {
  const std::optional<StateLine> line = co_await line_by_head(place, directory);
  co_return line ? std::optional(line->id) : std::nullopt;
}

Task<bool> is_newest_of_line(TextPlace place, std::string directory) {
  std::filesystem::path path = std::filesystem::path(directory).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();  // it ends with a slash
  const std::optional<CheckpointEntry> own = entry_of(path.filename().string());
  const std::optional<LineId> line = co_await line_of_checkpoint(place, directory);
  if (!own || !line) co_return false;
  const std::string folder = path.has_parent_path() ? path.parent_path().string() : ".";
  for (const CheckpointEntry& its : whole_checkpoints(place.io, folder)) {
    if (its.step <= own->step) continue;
    if (co_await line_of_checkpoint(place, path_of(folder, its.name)) == line) co_return false;
  }
  co_return true;
}

Task<> mark_damaged(TextPlace place, std::string directory, std::string why) {
  co_await write_text(place, path_of(directory, kMark), why + "\n");
  const std::function<void()> sync = [&] { place.io.sync_directory(directory); };
  co_await place.calls.run(place.reactor, sync);
}

void unmark_damaged(IoEngine& io, const std::string& directory) {
  if (io.exists(path_of(directory, kMark))) io.remove(path_of(directory, kMark));
}

Task<std::string> find_checkpoint(TextPlace place, std::string path) {
  if (place.io.exists(path_of(path, Manifest::kFileName))) co_return path;
  const std::vector<CheckpointEntry> entries = whole_checkpoints(place.io, path);
  if (entries.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: there is no checkpoint, because the directory has neither a {} "
                            "nor a directory {}.. that has one",
                            path, Manifest::kFileName, kNameBegin),
                ENOENT);
  }
  if (entries.size() == 1) co_return path_of(path, entries.front().name);
  const std::vector<CheckpointFacts> all = co_await look_at_checkpoints(place, path);
  const auto newer_unreadable = std::ranges::find_if(
      all.rbegin(), all.rend(), [](const CheckpointFacts& its) { return !its.readable; });
  const LineHistory history(all);
  const std::vector<const LineOfCheckpoints*> newest = history.newest();
  if (newest.empty()) co_return path_of(path, entries.back().name);
  if (newest.size() != 1) {
    std::vector<std::string> lines;
    for (const LineOfCheckpoints* const line : newest) lines.push_back(line->description());
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} has checkpoints of several lines of history, and none of the lines "
                            "is the newest ({}): name one checkpoint itself",
                            path, fmt::join(lines, "; ")));
  }
  CheckpointEntry chosen = newest.front()->checkpoints.back().entry;
  if (newer_unreadable != all.rend()) chosen = std::max(chosen, newer_unreadable->entry);
  co_return path_of(path, chosen.name);
}

std::unique_ptr<DirectFile> lock_checkpoints(TextPlace place, const std::string& folder,
                                             std::chrono::milliseconds wait) {
  const std::string path = folder + "/.lock";
  const bool is_new = !place.io.exists(path);
  try {
    return DirectFile::open(
        place.reactor, place.io, path,
        {.create = is_new, .writable = true, .direct = false, .lock = true, .lock_wait = wait},
        place.observers);
  } catch (const Error& error) {
    const int native = error.native();
    if (native == ENOSYS || native == EOPNOTSUPP || native == ENOLCK) return nullptr;
    // EEXIST: another process has made the file since exists() looked.
    const bool is_other = native == EWOULDBLOCK || native == EEXIST;
    if (!is_other) throw;
    const std::string holder = native == EWOULDBLOCK ? fmt::format(" ({})", error.what()) : "";
    throw Error(ErrorCode::kUnavailable,
                fmt::format("another save in {} is under way, or its last writes are{}: save to "
                            "another folder, or wait until it has ended",
                            folder, holder),
                EWOULDBLOCK);
  }
}

std::string remove_checkpoint(IoEngine& io, const std::string& directory) {
  const auto unless_gone = [](const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      if (error.native() != ENOENT) throw;
    }
  };
  if (is_link(directory)) return directory + " is a link, so it stays";
  try {
    unless_gone([&] { io.remove(path_of(directory, Manifest::kFileName)); });
    // Sync even if there was no manifest: whoever removed it may have been killed before that was
    // durable.
    unless_gone([&] { io.sync_directory(directory); });
    std::vector<std::string> names;
    unless_gone([&] { names = io.names_in(directory); });
    std::vector<std::string> others;
    for (const std::string& name : names) {
      if (!is_ours(name)) {
        others.push_back(name);
      } else {
        unless_gone([&] { io.remove(path_of(directory, name)); });
      }
    }
    if (others.empty()) {
      unless_gone([&] { io.remove_directory(directory); });
      return "";
    }
    const std::size_t count = others.size();
    others.resize(std::min<std::size_t>(count, 3));
    return fmt::format("the directory {} stays, because it has files that no save made ({}{})",
                       directory, fmt::join(others, ", "), count > others.size() ? ", .." : "");
  } catch (const Error& error) {
    return fmt::format("not all files of {} can be removed: {}", directory, error.what());
  }
}

}  // namespace ziggurat
