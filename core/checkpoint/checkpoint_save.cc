// SPDX-License-Identifier: Apache-2.0
// core/checkpoint/checkpoint_save.cc: the order of a commit, and what is left when it fails.
#include "core/checkpoint/checkpoint_save.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <utility>

#include "base/error.h"
#include "tiers/quorum.h"

namespace ziggurat {
namespace {

constexpr std::string_view kNameBegin = "step-";

std::string manifest_path(const std::string& directory) {
  return fmt::format("{}/{}", directory, Manifest::kFileName);
}

/// The steps that have a directory, whole or not.
std::vector<std::uint64_t> steps_in(IoEngine& io, const std::string& folder) {
  std::vector<std::uint64_t> steps;
  std::vector<std::string> names;
  try {
    names = io.names_in(folder);
  } catch (const Error& error) {
    if (error.native() != ENOENT) throw;
  }
  for (const std::string& name : names) {
    std::uint64_t step = 0;
    const char* const digits = name.data() + std::min(name.size(), kNameBegin.size());
    const auto [end, error] = std::from_chars(digits, name.data() + name.size(), step);
    if (error == std::errc{} && checkpoint_name(step) == name) steps.push_back(step);
  }
  return steps;
}

/// Another rank may remove it too.
void remove_if_there(IoEngine& io, const std::string& path) {
  try {
    io.remove(path);
  } catch (const Error& error) {
    if (error.native() != ENOENT) throw;
  }
}

/// Never empty.
std::string text_of(const std::exception_ptr& error) {
  std::string text;
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& what) {
    text = what.what();
  }
  return text.empty() ? "it does not say why" : text;
}

}  // namespace

std::string checkpoint_name(std::uint64_t step) { return fmt::format("{}{:09}", kNameBegin, step); }

std::vector<std::uint64_t> checkpoint_steps(IoEngine& io, const std::string& folder) {
  std::vector<std::uint64_t> steps;
  for (const std::uint64_t step : steps_in(io, folder)) {
    if (io.exists(manifest_path(folder + "/" + checkpoint_name(step)))) steps.push_back(step);
  }
  std::ranges::sort(steps);
  return steps;
}

std::string find_checkpoint(IoEngine& io, const std::string& path) {
  if (io.exists(manifest_path(path))) return path;
  const std::vector<std::uint64_t> steps = checkpoint_steps(io, path);
  if (!steps.empty()) return path + "/" + checkpoint_name(steps.back());
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}: there is no checkpoint: neither a {}, nor a directory {}.. with one",
                          path, Manifest::kFileName, kNameBegin),
              ENOENT);
}

std::vector<std::uint64_t> expired(const std::vector<std::uint64_t>& steps, Retention retention,
                                   std::optional<std::uint64_t> best) {
  std::vector<std::uint64_t> gone;
  if (retention.keep_last == 0) return gone;
  const std::uint64_t older =
      steps.size() - std::min<std::uint64_t>(steps.size(), retention.keep_last);
  const auto is_best = [&](std::uint64_t i) {  // or the first after it, where it was not saved
    return retention.keep_best && best && steps[i] >= *best && (i == 0 || steps[i - 1] < *best);
  };
  for (std::uint64_t i = 0; i < older; ++i) {
    const bool stays = retention.keep_every > 0 && steps[i] % retention.keep_every == 0;
    if (!stays && !is_best(i)) gone.push_back(steps[i]);
  }
  return gone;
}

void remove_checkpoint(IoEngine& io, const std::string& directory) {
  if (io.exists(manifest_path(directory))) io.remove(manifest_path(directory));
  // Also where there is none: whoever removed it may have been killed before that was durable.
  io.sync_directory(directory);
  for (const std::string& name : io.names_in(directory))
    remove_if_there(io, directory + "/" + name);
  io.remove_directory(directory);
}

CheckpointSave::CheckpointSave(Environment environment, Request request)
    : environment_(environment),
      request_(std::move(request)),
      directory_(request_.folder + "/" + checkpoint_name(request_.content.step)) {}

/// All ranks go on, or each throws: what it met itself, or what another did. Who only followed
/// another leaves the word to that one.
Task<> CheckpointSave::agree(std::exception_ptr error) {
  struct Message {
    std::array<char, 512> text{};  ///< ends with a NUL; empty: nothing is wrong
  };
  Message own;
  const bool follows = followed_from_another(error);
  if (error && !follows) {
    const std::string why = text_of(error);
    std::copy_n(why.begin(), std::min(why.size(), own.text.size() - 1), own.text.begin());
  }
  std::vector<Message> all(static_cast<std::size_t>(environment_.ranks.world_size()));
  co_await environment_.ranks.all_gather(std::as_bytes(std::span(&own, 1)),
                                         std::as_writable_bytes(std::span(all)));
  if (error && !follows) std::rethrow_exception(error);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].text[0] == 0) continue;
    throw PeerFailed(ErrorCode::kUnavailable, fmt::format("{}: rank {} could not save its part: {}",
                                                          directory_, rank, all[rank].text.data()));
  }
  if (error) std::rethrow_exception(error);
}

void CheckpointSave::make_directory() {
  IoEngine& io = environment_.io;
  io.make_directory(request_.folder);
  lock_folder();
  if (io.exists(manifest_path(directory_))) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: this step's checkpoint is there already, and stays as it is", directory_),
        EEXIST);
  }
  remove_cut_off();
  io.make_directory(directory_);
}

void CheckpointSave::lock_folder() {
  const std::string path = request_.folder + "/.lock";
  const bool is_new = !environment_.io.exists(path);
  try {
    lock_ = DirectFile::open(environment_.reactor, environment_.io, path,
                             {.create = is_new,
                              .writable = true,
                              .direct = false,
                              .lock = true,
                              .lock_wait = std::chrono::seconds(1)},
                             environment_.observers);
  } catch (const Error& error) {
    const int native = error.native();
    if (native == ENOSYS || native == EOPNOTSUPP || native == ENOLCK) return;
    const bool is_other = native == EWOULDBLOCK || native == EEXIST;  // made since we looked
    if (!is_other) throw;
    throw Error(ErrorCode::kUnavailable,
                fmt::format("{}: another process saves a checkpoint there now; save to a folder of "
                            "its own, or when it has ended",
                            request_.folder),
                EWOULDBLOCK);
  }
}

/// What has no manifest. Without a lock others may be writing it, but for this step's.
void CheckpointSave::remove_cut_off() {
  IoEngine& io = environment_.io;
  for (const std::uint64_t step : steps_in(io, request_.folder)) {
    const std::string directory = request_.folder + "/" + checkpoint_name(step);
    if (!lock_ && directory != directory_) continue;
    if (!io.exists(manifest_path(directory))) remove_checkpoint(io, directory);
  }
}

Task<std::unique_ptr<CheckpointSave>> CheckpointSave::begin(Environment environment,
                                                            Request request) {
  std::unique_ptr<CheckpointSave> save(new CheckpointSave(environment, std::move(request)));
  std::exception_ptr error;
  const std::function<void()> make = [&] {
    if (environment.ranks.rank() == 0) save->make_directory();
  };
  try {
    co_await save->call(make);
  } catch (...) {
    error = std::current_exception();
  }
  co_await save->agree(error);
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
    co_await save->agree(error);
  } catch (...) {
    agreed = std::current_exception();
  }
  if (agreed) {
    const std::function<void()> clean = [&] { save->clean(); };
    co_await save->call(clean);
    std::rethrow_exception(agreed);
  }
  co_return std::move(save);
}

Task<> CheckpointSave::commit(std::exception_ptr failure) {
  Manifest manifest;
  std::exception_ptr error = failure;
  if (!error) {
    try {
      manifest.pieces = co_await writer_->finish();
      manifest.files = writer_->files();
    } catch (...) {
      error = std::current_exception();
    }
  }
  std::exception_ptr agreed;
  try {
    co_await agree(error);
    // Rank 0 may publish from here on, and die before it says so: nobody else removes a file.
    writer_->keep();
    co_await gather(manifest);
    std::exception_ptr published;
    if (environment_.ranks.rank() == 0) {
      try {
        co_await publish(manifest);
      } catch (...) {
        published = std::current_exception();
      }
    }
    co_await agree(published);
  } catch (...) {
    agreed = std::current_exception();
  }
  if (!agreed) co_return;
  const std::function<void()> remove = [&] { clean(); };
  co_await call(remove);
  std::rethrow_exception(agreed);
}

/// Rank 0's manifest gets the files and pieces of all.
Task<> CheckpointSave::gather(Manifest& manifest) {
  Communicator& ranks = environment_.ranks;
  // Megabytes of text, where tensors are many: not on the reactor's thread.
  std::string own;
  const std::function<void()> write_own = [&] { own = files_text(manifest); };
  co_await call(write_own);
  const std::uint64_t size = own.size();
  std::vector<std::uint64_t> sizes(static_cast<std::size_t>(ranks.world_size()));
  co_await ranks.all_gather(std::as_bytes(std::span(&size, 1)),
                            std::as_writable_bytes(std::span(sizes)));
  if (ranks.rank() != 0) {
    co_await ranks.send(std::as_bytes(std::span(own)), 0);
    co_return;
  }
  manifest.content = request_.content;
  for (int rank = 1; rank < ranks.world_size(); ++rank) {
    std::string text(sizes[static_cast<std::size_t>(rank)], '\0');
    co_await ranks.recv(std::as_writable_bytes(std::span(text)), rank);
    const std::function<void()> add = [&] {
      add_files(manifest, text, fmt::format("rank {}'s part of {}", rank, directory_));
    };
    co_await call(add);
  }
}

/// Errors: before the manifest is durable under its name, and then nothing is under it; or of what
/// follows, and then the checkpoint is whole (published_).
Task<> CheckpointSave::publish(const Manifest& manifest) {
  IoEngine& io = environment_.io;
  std::string text;
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
    // The names of the shards are durable before the manifest that speaks of them.
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
                      checkpoint_name(request_.content.step) + "\n");
  const std::function<void()> retain = [&] { let_go(); };
  co_await call(retain);
}

/// What the request's retention lets go.
void CheckpointSave::let_go() {
  IoEngine& io = environment_.io;
  io.sync_directory(request_.folder);  // `latest`, before what it named is removed
  std::vector<std::uint64_t> steps = checkpoint_steps(io, request_.folder);
  // Above this one is what a run that stands behind it has not made: it is not counted, and stays.
  std::erase_if(steps, [&](std::uint64_t step) { return step > request_.content.step; });
  const std::vector<std::uint64_t> gone =
      expired(steps, request_.retention, best_step(request_.content));
  for (const std::uint64_t step : gone)
    remove_checkpoint(io, request_.folder + "/" + checkpoint_name(step));
  if (!gone.empty()) io.sync_directory(request_.folder);
}

/// False where the manifest may be there after a crash: then every file that it names must be.
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
  if (published_ || environment_.ranks.rank() != 0) return;
  try {
    remove_checkpoint(environment_.io, directory_);
  } catch (const std::exception&) {
    // It has no manifest: nobody takes it for a checkpoint, and the next save removes it.
  }
}

}  // namespace ziggurat
