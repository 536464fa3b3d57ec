// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/checkpoint_save.cc: the order of a save, and what is removed when it fails.
#include "core/checkpoint/checkpoint_save.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace ziggurat {
namespace {

/// How long a save waits until another process's save has ended.
constexpr std::chrono::seconds kLockWait{1};

std::string manifest_path(const std::string& directory) {
  return fmt::format("{}/{}", directory, Manifest::kFileName);
}

}  // namespace

CheckpointSave::CheckpointSave(Environment environment, Request request)
    : environment_(environment),
      request_(std::move(request)),
      ranks_(environment.reactor, environment.ranks),
      directory_(request_.folder + "/" + checkpoint_name(request_.content.step)) {}

std::optional<LineId> CheckpointSave::line() const {
  const std::optional<StateLine>& its = request_.content.line;
  return its ? std::optional(its->id) : std::nullopt;
}

/// Makes the directory on rank 0, and tells its name to all ranks.
Task<> CheckpointSave::agree_on_directory() {
  std::exception_ptr error;
  try {
    if (ranks_.rank() == 0) co_await make_directory();
  } catch (...) {
    error = std::current_exception();
  }
  co_await ranks_.agree(error, directory_);
  std::string own = directory_.substr(directory_.rfind('/') + 1);
  Task<std::string> saying = ranks_.of_first(std::move(own));
  directory_ = request_.folder + "/" + co_await std::move(saying);
}

/// Makes the directory under the step's own name. If that name belongs to another line or to
/// somebody else, uses the name that also has the line.
Task<> CheckpointSave::make_directory() {
  IoEngine& io = environment_.io;
  const std::function<void()> begin = [&] {
    io.make_directory(request_.folder);
    lock_ = lock_checkpoints(text_place(), request_.folder, kLockWait);
    remove_cut_off();
  };
  co_await call(begin);
  const std::uint64_t step = request_.content.step;
  std::vector<std::string> names{checkpoint_name(step)};
  if (line()) names.push_back(checkpoint_name(step, *line()));
  for (std::string& name : names) {
    const CheckpointEntry entry{.step = step, .name = std::move(name)};
    directory_ = request_.folder + "/" + entry.name;
    if (!co_await takes(entry)) continue;
    // Without locks only the line's own name says whose a save is that was cut off.
    if (!lock_ && line() && entry.name == checkpoint_name(step)) continue;
    const std::function<void()> make = [&] { io.make_directory(directory_); };
    co_await call(make);
    co_return;
  }
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} is not a checkpoint of this line of history, but has the name of the "
                          "new one: move it away",
                          directory_),
              EEXIST);
}

/// Returns true if the name is free. A checkpoint that this one replaces is removed first.
Task<bool> CheckpointSave::takes(const CheckpointEntry& name) {
  IoEngine& io = environment_.io;
  const std::string directory = request_.folder + "/" + name.name;
  bool there = false;
  bool whole = false;
  bool left = false;
  const std::function<void()> look = [&] {
    there = io.exists(directory);
    left = there && std::ranges::none_of(checkpoint_entries(io, request_.folder),
                                         [&](const auto& its) { return its == name; });
    whole = there && !left && io.exists(manifest_path(directory));
    left = left || (there && !whole && !io.names_in(directory).empty());
  };
  co_await call(look);
  if (left) co_return false;
  if (!whole) co_return true;
  const CheckpointFacts its = co_await look_at_checkpoint(text_place(), request_.folder, name);
  // A checkpoint that cannot be read may be another line's: replace it only if it names this line.
  if (its.line_id() != line()) co_return false;
  if (its.counts()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("this step's checkpoint {} exists already and stays as it is", directory),
        EEXIST);
  }
  if (!its.damaged) {
    throw Error(
        ErrorCode::kUnavailable,
        fmt::format("this step's checkpoint {} exists already, and is not replaced, because "
                    "it may be whole although it cannot be read now: {}",
                    directory, its.flaw));
  }
  notes_.push_back(
      fmt::format("the checkpoint {} is replaced, because it is damaged: {}", directory, its.flaw));
  std::string left_over;
  const std::function<void()> replace = [&] { left_over = remove_checkpoint(io, directory); };
  co_await call(replace);
  if (!left_over.empty()) notes_.push_back(left_over);
  co_return left_over.empty();
}

/// Removes directories without a manifest. Without a lock other processes may be writing them, so
/// this removes only those with this line's name, of any step, because nobody else saves them.
void CheckpointSave::remove_cut_off() {
  IoEngine& io = environment_.io;
  const std::uint64_t step = request_.content.step;
  const auto is_own = [&](const CheckpointEntry& entry) {
    return entry.name == (line() ? checkpoint_name(entry.step, *line()) : checkpoint_name(step));
  };
  for (const CheckpointEntry& entry : checkpoint_entries(io, request_.folder)) {
    const std::string directory = request_.folder + "/" + entry.name;
    if (io.exists(manifest_path(directory))) continue;
    if (lock_ || is_own(entry)) {
      remove(directory);
    } else if (entry.step == step) {
      notes_.push_back(
          fmt::format("{} has no manifest but stays, because this filesystem has no locks and "
                      "another process may be writing it: remove it if no process is",
                      directory));
    }
  }
}

void CheckpointSave::remove(const std::string& directory) {
  std::string left = remove_checkpoint(environment_.io, directory);
  if (!left.empty()) notes_.push_back(std::move(left));
}

Task<std::unique_ptr<CheckpointSave>> CheckpointSave::begin(Environment environment,
                                                            Request request) {
  std::unique_ptr<CheckpointSave> save(new CheckpointSave(environment, std::move(request)));
  std::exception_ptr error;
  try {
    co_await save->agree_on_directory();
  } catch (...) {
    error = std::current_exception();
  }
  if (error) {
    save->say_notes();
    std::rethrow_exception(error);
  }
  try {
    const std::vector<StateTensor>& tensors = save->request_.content.tensors;
    Task<std::unique_ptr<CheckpointWriter>> making =
        CheckpointWriter::create({environment.reactor, environment.workers, environment.io,
                                  environment.observers, environment.calls},
                                 save->directory_, std::move(save->request_.plan), tensors);
    save->writer_ = co_await std::move(making);
  } catch (...) {
    error = std::current_exception();
  }
  std::exception_ptr agreed;
  try {
    co_await save->ranks_.agree(error, save->directory_);
  } catch (...) {
    agreed = std::current_exception();
  }
  if (agreed) {
    const std::function<void()> clean = [&] { save->clean(); };
    co_await save->call(clean);
    save->say_notes();
    std::rethrow_exception(agreed);
  }
  co_return std::move(save);
}

/// Logs the notes of a save that did not begin, because nobody can ask for them.
void CheckpointSave::say_notes() const {
  for (const std::string& note : notes_) log().warn("{}", note);
}

/// After each part that can fail on one rank alone, all ranks agree before any of them waits for
/// the next part.
Task<> CheckpointSave::commit(std::exception_ptr failure) {
  Manifest manifest;
  std::string files;
  std::exception_ptr error = failure;
  try {
    if (!error) {
      manifest.pieces = co_await writer_->finish();
      manifest.files = writer_->files();
      // The text has megabytes if there are many tensors, so it is not made on the reactor's
      // thread.
      const std::function<void()> write_own = [&] { files = files_text(manifest); };
      co_await call(write_own);
    }
  } catch (...) {
    error = std::current_exception();
  }
  std::exception_ptr agreed;
  try {
    co_await ranks_.agree(error, directory_);
    Task<std::vector<std::string>> making = ranks_.room_at_first(files.size(), directory_);
    std::vector<std::string> all = co_await std::move(making);
    // From here on rank 0 may publish and die before it says so, so no other rank removes a file.
    writer_->keep();
    co_await ranks_.to_first(files, all);
    std::exception_ptr published;
    try {
      if (ranks_.rank() == 0) {
        Task<> publishing = publish(std::move(manifest), all);
        co_await std::move(publishing);
      }
    } catch (...) {
      published = std::current_exception();
    }
    co_await ranks_.agree(published, directory_);
  } catch (...) {
    agreed = std::current_exception();
  }
  if (!agreed) co_return;
  const std::function<void()> remove = [&] { clean(); };
  co_await call(remove);
  std::rethrow_exception(agreed);
}

Task<> CheckpointSave::remove_all() {
  if (ranks_.rank() != 0) writer_->keep();
  const std::function<void()> remove = [&] { clean(); };
  co_await call(remove);
}

/// Publishes the manifest with the files and pieces of all ranks, `files[rank]`. After an error
/// that comes before the manifest is durable, nothing has its name. After a later error the
/// checkpoint is whole (published_).
Task<> CheckpointSave::publish(Manifest manifest, std::span<const std::string> files) {
  IoEngine& io = environment_.io;
  std::string text;
  const std::function<void()> add_all = [&] {
    manifest.content = request_.content;
    for (std::size_t rank = 1; rank < files.size(); ++rank)
      add_files(manifest, files[rank], fmt::format("{} of rank {}", directory_, rank));
  };
  const std::function<void()> sync_shards = [&] {
    io.sync_directory(directory_);
    text = to_text(manifest);
  };
  const std::function<void()> sync_manifest = [&] {
    io.sync_directory(directory_);
    io.sync_directory(request_.folder);
  };
  std::exception_ptr error;
  try {
    co_await call(add_all);
    // Make the names of the shards durable before the manifest names them.
    co_await call(sync_shards);
    Task<> writing = write_text(text_place(), manifest_path(directory_), std::move(text));
    co_await std::move(writing);
    co_await call(sync_manifest);
    published_ = true;
  } catch (...) {
    error = std::current_exception();
  }
  if (error) {
    const std::function<void()> undo = [&] { published_ = !withdraw(); };
    co_await call(undo);
    std::rethrow_exception(error);
  }
  co_await write_text(text_place(), request_.folder + "/latest",
                      directory_.substr(directory_.rfind('/') + 1) + "\n");
  const std::function<void()> sync_latest = [&] { io.sync_directory(request_.folder); };
  co_await call(sync_latest);  // durable before retain() removes what `latest` named before
  co_await retain();
}

Task<> CheckpointSave::retain() noexcept {
  try {
    if (request_.retention.keep_last > 0) co_await let_go();
  } catch (const std::exception& error) {
    notes_.push_back(fmt::format("old checkpoints in {} could not be removed: {}", request_.folder,
                                 error.what()));
  }
}

/// Removes what the request's retention lets go. Reads only the first bytes of other lines'
/// manifests.
Task<> CheckpointSave::let_go() {
  IoEngine& io = environment_.io;
  std::vector<CheckpointEntry> entries;
  const std::function<void()> list = [&] { entries = whole_checkpoints(io, request_.folder); };
  co_await call(list);
  CheckpointFacts newest;
  newest.entry = {.step = request_.content.step,
                  .name = directory_.substr(directory_.rfind('/') + 1)};
  newest.line = request_.content.line;
  newest.best_step = best_step(request_.content);
  std::vector<CheckpointFacts> own;
  for (const CheckpointEntry& entry : entries) {
    if (entry.step >= newest.entry.step) continue;
    const std::optional<LineId> its =
        co_await line_of_checkpoint(text_place(), request_.folder + "/" + entry.name);
    if (its != line()) continue;
    own.push_back(co_await look_at_checkpoint(text_place(), request_.folder, entry));
  }
  const std::vector<CheckpointEntry> gone = expired(own, request_.retention, newest);
  const std::function<void()> remove_them = [&] {
    for (const CheckpointEntry& entry : gone) remove(request_.folder + "/" + entry.name);
    if (!gone.empty()) io.sync_directory(request_.folder);
  };
  co_await call(remove_them);
}

/// Removes the manifest again. Returns false if it may be there after a crash: every file that it
/// names must stay then.
bool CheckpointSave::withdraw() noexcept {
  try {
    if (environment_.io.exists(manifest_path(directory_)))
      environment_.io.remove(manifest_path(directory_));
    environment_.io.sync_directory(directory_);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void CheckpointSave::clean() noexcept {
  writer_.reset();
  if (published_ || ranks_.rank() != 0) return;
  // What is left has no manifest, so nobody takes it for a checkpoint, and the next save removes
  // it.
  try {
    static_cast<void>(remove_checkpoint(environment_.io, directory_));
  } catch (const std::exception&) {
    // Likewise.
  }
}

}  // namespace ziggurat
