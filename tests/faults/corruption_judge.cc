// SPDX-License-Identifier: Apache-2.0
// tests/faults/corruption_judge.cc: which tensors were hit is computed from the bytes, not asked.
#include "tests/faults/corruption_judge.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "core/checkpoint/checkpoint_save.h"
#include "tests/support/store_file.h"

namespace ziggurat::faults {
namespace {

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Whether bytes [begin, end) of `path` are not what they were.
bool differs(const SavedState& state, const Files& files, const std::string& path,
             std::uint64_t begin, std::uint64_t end) {
  const std::vector<std::byte>& was = state.now.at(path);
  const std::vector<std::byte>& is = files.at(path);
  return is.size() < end || std::memcmp(was.data() + begin, is.data() + begin, end - begin) != 0;
}

bool names_any(const std::string& text, const std::set<std::string>& paths) {
  return std::ranges::any_of(paths, [&](const std::string& path) { return has(text, path); });
}

/// Tensors of a checkpoint whose bytes were hit.
std::set<std::string> hit_tensors(const SavedState& state, const Files& files,
                                  const std::string& directory) {
  std::set<std::string> hit;
  for (const StatePiece& piece : state.manifest.pieces) {
    std::uint64_t end = piece.offset_bytes;
    for (const HashedBytes& hashed : piece.hashed) end += hashed.size_bytes;
    const std::string path = directory + "/" + state.manifest.files[piece.file].name;
    if (differs(state, files, path, piece.offset_bytes, end))
      hit.insert(state.manifest.content.tensors[piece.tensor].name);
  }
  return hit;
}

Verdict finding(std::string& why, std::string its) {
  why = std::move(its);
  return Verdict::kFinding;
}

struct CheckpointCase {
  const SavedState& state;
  const Files& files;
  std::set<std::string> changed;
  std::string directory;
  std::set<std::string> hit;

  std::string manifest_path() const { return directory + "/" + std::string(Manifest::kFileName); }
  bool has_manifest() const { return !changed.contains(manifest_path()); }
  bool is_named(const std::string& message) const {
    // A manifest of another step disagrees with every shard: the message names both.
    return names_any(message, changed) || (!has_manifest() && has(message, ".safetensors"));
  }
  /// The headers that were hit, by path.
  std::set<std::string> hit_headers() const {
    std::set<std::string> paths;
    for (const StateFile& file : state.manifest.files) {
      const std::string path = directory + "/" + file.name;
      if (differs(state, files, path, 0, file.header_bytes)) paths.insert(path);
    }
    return paths;
  }
};

Verdict judge_refusal(const CheckpointCase& its, const Reading& reading, std::string& why) {
  if (!its.is_named(reading.refusal))
    return finding(why, "the refusal names no changed file: " + reading.refusal);
  const bool tensor_named =
      its.hit.empty() || std::ranges::any_of(its.hit, [&](const std::string& name) {
        return has(reading.refusal, "'" + name + "'");
      });
  if (its.has_manifest() && !tensor_named)
    return finding(why, "the refusal names no tensor that was hit: " + reading.refusal);
  return Verdict::kRefused;
}

Verdict judge_checkpoint(const CheckpointCase& its, const Reading& reading, std::string& why) {
  if (!reading.refusal.empty()) return judge_refusal(its, reading, why);
  for (const auto& [name, error] : reading.errors) {
    if (!its.is_named(error) || !has(error, "'" + name + "'"))
      return finding(why, fmt::format("the error of {} names no file or tensor: {}", name, error));
    if (its.has_manifest() && !its.hit.contains(name))
      return finding(why, fmt::format("{} was not hit: {}", name, error));
  }
  for (const std::string& name : its.hit) {
    if (its.has_manifest() && !reading.errors.contains(name))
      return finding(why, name + " was hit, and is given out");
  }
  for (const std::string& error : reading.verify) {
    if (!its.is_named(error)) return finding(why, "verify names no changed file: " + error);
  }
  for (const std::string& path : its.hit_headers()) {
    const bool found = std::ranges::any_of(
        reading.verify, [&](const std::string& error) { return has(error, path); });
    if (its.has_manifest() && !found) return finding(why, "verify takes the header of " + path);
  }
  if (!reading.errors.empty()) return Verdict::kTensorNamed;
  if (!reading.verify.empty()) return Verdict::kFoundByVerify;
  const bool elsewhere = std::ranges::none_of(
      its.changed, [&](const std::string& path) { return path.starts_with(its.directory + "/"); });
  if (elsewhere && reading.step == its.state.newest) return Verdict::kHarmless;
  return finding(why, "nobody noticed anything");
}

Verdict judge_store(const SavedState& state, const std::set<std::string>& changed,
                    const Damage& damage, const Reading& reading, std::string& why) {
  if (!reading.refusal.empty()) {
    if (names_any(reading.refusal, changed)) return Verdict::kRefused;
    return finding(why, "the refusal names no changed file: " + reading.refusal);
  }
  std::vector<std::string> errors = reading.verify;
  for (const auto& [name, error] : reading.errors) errors.push_back(error);
  for (const std::string& error : errors) {
    const bool named = names_any(error, changed) && has(error, "chunk ") &&
                       has(error, fmt::format("generation {}", reading.step));
    if (!named) return finding(why, "the error names no file, chunk and generation: " + error);
  }
  if (!reading.errors.empty() && reading.verify.empty())
    return finding(why, "verify takes what a reader does not");
  const bool said = std::ranges::any_of(
      reading.notes, [&](const std::string& note) { return names_any(note, changed); });
  if (reading.step + 1 == state.newest) {
    // Where no superblock is left that says so, nothing knows which generation it was.
    const bool loss_named = std::ranges::any_of(reading.notes, [&](const std::string& note) {
      return has(note, fmt::format("generation {}", state.newest)) ||
             has(note, "no copy is whole, so a generation is lost");
    });
    if (!said || !loss_named)
      return finding(why, fmt::format("generation {} is read, and nothing is said of {}",
                                      reading.step, state.newest));
  }
  if (!errors.empty())
    return reading.errors.empty() ? Verdict::kFoundByVerify : Verdict::kTensorNamed;
  if (reading.step + 1 == state.newest) return Verdict::kFellBack;
  if (reading.step == state.newest) return said ? Verdict::kHarmlessSaid : Verdict::kHarmless;
  if (damage.whole_file && state.now.size() == 1) return Verdict::kOlderCopy;
  return finding(why, fmt::format("generation {} is read", reading.step));
}

}  // namespace

const char* to_string(Verdict verdict) {
  switch (verdict) {
    case Verdict::kUnchanged: return "unchanged";
    case Verdict::kRefused: return "refused, file named";
    case Verdict::kTensorNamed: return "tensor or chunk named";
    case Verdict::kFoundByVerify: return "found by verify";
    case Verdict::kFellBack: return "generation before, said";
    case Verdict::kOlderCopy: return "older copy, whole";
    case Verdict::kHarmlessSaid: return "right bits, damage said";
    case Verdict::kHarmless: return "right bits";
    case Verdict::kFinding: return "finding";
  }
  return "?";
}

Verdict Judge::judge(const SavedState& state, Files& files, const Damage& damage,
                     std::string& why) {
  const std::set<std::string> changed = changed_paths(state, files, damage);
  if (changed.empty()) return Verdict::kUnchanged;
  Reading reading;
  io_.files.swap(files);
  try {
    reactor_.block_on(read(state, reading));
  } catch (const Error& error) {
    reading.refusal = error.what();
  } catch (const std::exception& error) {
    reading.fault = fmt::format("an exception that is no Error: {}", error.what());
  }
  io_.files.swap(files);
  if (!reading.fault.empty()) return finding(why, reading.fault);
  if (!reading.wrong.empty())
    return finding(
        why, fmt::format("wrong bits of {} in step {}", *reading.wrong.begin(), reading.step));
  if (state.is_store) return judge_store(state, changed, damage, reading, why);
  const std::string directory = state.directories.front() + "/" + checkpoint_name(state.newest);
  return judge_checkpoint({.state = state,
                           .files = files,
                           .changed = changed,
                           .directory = directory,
                           .hit = hit_tensors(state, files, directory)},
                          reading, why);
}

Task<> Judge::read(const SavedState& state, Reading& reading) {
  return state.is_store ? read_store(state, reading) : read_checkpoint(state, reading);
}

Task<> Judge::read_checkpoint(const SavedState& state, Reading& reading) {
  Task<std::string> finding =
      find_checkpoint({.reactor = reactor_, .io = io_}, state.directories.front());
  std::string found = co_await std::move(finding);
  Task<std::unique_ptr<CheckpointReader>> opening =
      CheckpointReader::open({reactor_, workers_, io_}, std::move(found));
  const std::unique_ptr<CheckpointReader> reader = co_await std::move(opening);
  reading.step = reader->content().step;
  co_await read_tensors(*reader, state, reading);
  for (std::size_t f = 0; f < reader->manifest().files.size(); ++f) {
    try {
      co_await reader->prove_header(f);
    } catch (const Error& error) {
      reading.verify.emplace_back(error.what());
    }
  }
  for (const StatePiece& piece : reader->manifest().pieces) {
    try {
      co_await reader->prove(piece);
    } catch (const Error& error) {
      reading.verify.emplace_back(error.what());
    }
  }
}

Task<> Judge::read_store(const SavedState& state, Reading& reading) {
  std::vector<StripePlace> places;
  for (const std::string& directory : state.directories)
    places.push_back({.io = io_, .observers = {}, .directory = directory});
  Task<std::unique_ptr<StoredState>> opening =
      StoredState::open(reactor_, workers_, std::move(places));
  const std::unique_ptr<StoredState> stored = co_await std::move(opening);
  reading.step = stored->content().step;
  reading.notes = stored->notes();
  co_await read_tensors(*stored, state, reading);
  try {
    co_await stored->prove({});
  } catch (const Error& error) {
    reading.verify.emplace_back(error.what());
  }
}

Task<> Judge::read_tensors(StateSource& source, const SavedState& state, Reading& reading) {
  const auto expected = state.tensors.find(reading.step);
  const std::vector<StateTensor>& tensors = source.content().tensors;
  if (expected == state.tensors.end() || tensors.size() != expected->second.size()) {
    reading.fault = fmt::format("{} tensors of step {}", tensors.size(), reading.step);
    co_return;
  }
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const auto its = expected->second.find(tensors[t].name);
    if (its == expected->second.end() || its->second.size() != tensors[t].size_bytes()) {
      reading.fault = fmt::format("a tensor '{}' that nobody saved", tensors[t].name);
      co_return;
    }
    std::vector<std::byte> bytes(its->second.size());
    const TensorRun whole{.first = 0, .count = tensors[t].count(), .at = 0};
    try {
      co_await source.read(t, std::span(&whole, 1), bytes);
      const bool same =
          bytes.empty() || std::memcmp(bytes.data(), its->second.data(), bytes.size()) == 0;
      if (!same) reading.wrong.insert(tensors[t].name);
    } catch (const Error& error) {
      reading.errors[tensors[t].name] = error.what();
    }
  }
}

}  // namespace ziggurat::faults
