// SPDX-License-Identifier: Apache-2.0
// tests/faults/saved_states.cc: a small model trained on real files, which are then taken into
// memory.
#include "tests/faults/saved_states.h"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "aio/thread_engine.h"
#include "core/checkpoint/checkpoint_reader.h"
#include "core/checkpoint/checkpoint_save.h"
#include "core/checkpoint/stored_state.h"
#include "tests/core/ranks_harness.h"
#include "tests/support/scratch_directory.h"
#include "tests/support/store_file.h"

namespace ziggurat::faults {
namespace {

/// Small enough that a case costs little, with pieces that ranks cut across rows.
ModelSpec tiny_model() {
  return {"tiny",
          {{"first",
            {{.name = "first.weight", .shape = {7, 40}}, {.name = "first.bias", .shape = {7}}}},
           {"second", {{.name = "second.weight", .shape = {3, 70}, .decay = false}}}}};
}

std::vector<std::byte> file_bytes(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

Files files_below(const std::string& directory) {
  Files files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    if (entry.is_regular_file()) files[entry.path().string()] = file_bytes(entry.path());
  }
  return files;
}

/// A job that goes on in the same store each time.
class Job {
 public:
  explicit Job(const Saver& saver) : saver_(saver) {
    for (int stripe = 0; stripe < saver.stripes; ++stripe)
      directories_.push_back(fmt::format("{}/store/{}", scratch_.path(), stripe));
  }

  /// Trains a step; saves a checkpoint of it if `folder` is one.
  void step(const std::string& folder) {
    const auto runtimes = testing::connected_runtimes(saver_.ranks, 1);
    testing::expect_none(testing::run_ranks(saver_.ranks, [&](int rank) {
      testing::RankRig rig(*runtimes[static_cast<std::size_t>(rank)], model_, config());
      testing::train_step(*rig.engine, model_, rig.engine->generation(), 0.01F, {}, 1.0F, rank);
      if (!folder.empty()) {
        rig.engine->save_checkpoint({.folder = folder, .resume = {}});
        rig.engine->finish_saves();
      }
      rig.engine->make_durable();
    }));
  }
  const std::string& scratch() const { return scratch_.path(); }
  const std::vector<std::string>& directories() const { return directories_; }

 private:
  EngineConfig config() const {
    EngineConfig config = testing::small_config("");
    config.store.clear();
    for (const std::string& directory : directories_) config.store.push_back({directory});
    config.strategy.zero_stage = saver_.ranks > 1 ? 3 : 0;
    config.optimizer.state.format = saver_.format;
    config.checkpoint.saves = true;
    return config;
  }

  Saver saver_;
  testing::ScratchDirectory scratch_;
  ModelSpec model_ = tiny_model();
  std::vector<std::string> directories_;
};

Task<> read_all(StateSource& source, TensorBytes& to) {
  const std::vector<StateTensor>& tensors = source.content().tensors;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    std::vector<std::byte>& bytes = to[tensors[t].name];
    bytes.resize(tensors[t].size_bytes());
    const TensorRun whole{.first = 0, .count = tensors[t].count(), .at = 0};
    co_await source.read(t, std::span(&whole, 1), bytes);
  }
}

Task<> read_checkpoint(Runtime& runtime, const std::string& directory, TensorBytes& to,
                       Manifest& manifest) {
  ThreadEngine io(runtime.reactor);
  Task<std::unique_ptr<CheckpointReader>> opening =
      CheckpointReader::open({runtime.reactor, *runtime.workers, io}, directory);
  const std::unique_ptr<CheckpointReader> reader = co_await std::move(opening);
  co_await read_all(*reader, to);
  manifest = reader->manifest();
}

Task<> read_store(Runtime& runtime, const std::vector<std::string>& directories, TensorBytes& to) {
  ThreadEngine io(runtime.reactor);
  std::vector<StripePlace> places;
  for (const std::string& directory : directories)
    places.push_back({.io = io, .observers = {}, .directory = directory});
  Task<std::unique_ptr<StoredState>> opening =
      StoredState::open(runtime.reactor, *runtime.workers, std::move(places));
  const std::unique_ptr<StoredState> state = co_await std::move(opening);
  co_await read_all(*state, to);
}

void add_checkpoint_regions(SavedState& state, const std::string& directory) {
  for (std::size_t f = 0; f < state.manifest.files.size(); ++f) {
    const StateFile& file = state.manifest.files[f];
    const std::string path = directory + "/" + file.name;
    state.regions.push_back({"shard header", path, 0, file.header_bytes});
    state.regions.push_back({"tensors of a shard", path, file.header_bytes, file.size_bytes});
  }
  const std::string manifest = directory + "/" + std::string(Manifest::kFileName);
  state.regions.push_back({"manifest", manifest, 0, state.now.at(manifest).size()});
  const std::string latest = state.directories.front() + "/latest";
  state.regions.push_back({"latest", latest, 0, state.now.at(latest).size()});
}

void add_store_regions(SavedState& state, const std::string& path) {
  const std::vector<std::byte>& bytes = state.now.at(path);
  const auto file = test::StoreFile::of(bytes);
  ASSERT_TRUE(file) << path;
  const StoreLayout& layout = file->layout;
  const auto add = [&](const char* what, std::uint64_t begin, std::uint64_t size) {
    state.regions.push_back({what, path, begin, begin + size});
  };
  for (const unsigned parity : {0u, 1u}) {
    for (int copy = 0; copy < kSuperblockCopies; ++copy)
      add("superblock", StoreLayout::superblock_offset(parity, copy, bytes.size()),
          kSuperblockBytes);
    add("checksum table", layout.table_offset[parity],
        layout.record_bytes.size() * kTableEntryBytes);
    add("blob", layout.blob_offset[parity], 256);
  }
  for (const std::uint64_t offset : layout.text_offset) add("layout text", offset, 2048);
  for (ChunkId chunk = 0; chunk < layout.record_bytes.size(); ++chunk) {
    for (const std::uint64_t generation : {state.newest, state.newest - 1})
      add(generation == state.newest ? "record" : "record of the generation before",
          layout.record_offset(chunk, generation), layout.record_bytes[chunk]);
  }
}

}  // namespace

SavedState saved_checkpoints(const Saver& saver) {
  Job job(saver);
  const std::string folder = job.scratch() + "/checkpoints";
  SavedState state;
  state.name = saver.name;
  state.directories = {folder};
  state.newest = 2;
  job.step(folder);
  job.step(folder);
  state.now = files_below(folder);
  const auto runtime = Runtime::create({.threads = 1, .trace_path = ""});
  for (const std::uint64_t step : {1U, 2U})
    runtime->reactor.block_on(read_checkpoint(*runtime, folder + "/" + checkpoint_name(step),
                                              state.tensors[step], state.manifest));
  const std::string before = folder + "/" + checkpoint_name(1) + "/";
  const std::string newest = folder + "/" + checkpoint_name(2);
  for (const auto& [path, bytes] : state.now) {
    if (path.starts_with(before)) state.old[newest + "/" + path.substr(before.size())] = bytes;
  }
  const std::string name = checkpoint_name(1) + "\n";
  const auto latest = std::as_bytes(std::span(name));
  state.old[folder + "/latest"].assign(latest.begin(), latest.end());
  add_checkpoint_regions(state, newest);
  return state;
}

SavedState saved_store(const Saver& saver) {
  Job job(saver);
  SavedState state;
  state.name = saver.name;
  state.is_store = true;
  state.directories = job.directories();
  state.newest = 3;
  const auto runtime = Runtime::create({.threads = 1, .trace_path = ""});
  for (std::uint64_t step = 1; step <= state.newest; ++step) {
    job.step("");
    state.now = files_below(job.scratch());
    if (step == 1) state.old = state.now;
    runtime->reactor.block_on(read_store(*runtime, job.directories(), state.tensors[step]));
  }
  for (const auto& [path, bytes] : state.now) add_store_regions(state, path);
  return state;
}

}  // namespace ziggurat::faults
