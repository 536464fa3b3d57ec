// SPDX-License-Identifier: Apache-2.0
// integrations/cli/ckpt_save.cc: `ziggurat ckpt save`, which copies a store into a checkpoint,
// record by record. The store may have any number of ranks and may be in use.
#include <fmt/format.h>

#include <filesystem>

#include "aio/aligned_bytes.h"
#include "base/bytes.h"
#include "core/checkpoint/joined_state.h"
#include "core/checkpoint/state_loader.h"
#include "core/checkpoint/state_saver.h"
#include "integrations/cli/checkpoint_files.h"
#include "integrations/cli/commands.h"
#include "integrations/cli/console.h"

namespace ziggurat::cli {
namespace {

/// The tiles of a record in the copy, as many as in the largest records of a training run.
constexpr std::uint64_t kChunkTiles = 32;

Task<> copy_records(Runtime& runtime, const ChunkTable& table, StateSource& from, StateSink& to,
                    Console& console) {
  StateLoader loader(runtime.reactor, *runtime.workers, table, from, {}, 0);
  StateSaver saver(runtime.reactor, *runtime.workers, table, to);
  std::uint64_t done = 0;
  AlignedPool memory;
  for (ChunkId id = 0; id < table.chunks().size(); ++id) {
    const AlignedBytes record = memory.take(table.chunk(id).record_bytes());
    co_await loader.load(id, record.span());
    co_await saver.save(id, record.span());
    done += record.span().size();
    console.progress("saving", done, table.total_record_bytes());
  }
}

Task<> save_whole(Runtime& runtime, StateSource& from, const ChunkTable& table,
                  const std::string& folder, Console& console) {
  const Give give = [&](StateSink& to) { return copy_records(runtime, table, from, to, console); };
  ShardPlan plan = plan_shards(table, ChunkRuns(table), SavingRank{});
  Task<WrittenCheckpoint> writing =
      write_checkpoint(runtime, folder, from.content(), std::move(plan), give);
  const WrittenCheckpoint written = co_await std::move(writing);
  for (const std::string& note : written.notes) console.line(note);
  console.line(fmt::format("{}: step {}, {}", written.directory, from.content().step,
                           format_bytes(written.size_bytes)));
}

/// Saves the store as whole tensors, which several ranks of a trainer that lends have in pieces.
Task<> save(Runtime& runtime, StoredState& from, const std::string& folder, Console& console) {
  if (!from.of_pieces() || from.content().layout.ranks == 1) {
    const ChunkTable table = from.whole_table(kChunkTiles);
    co_await save_whole(runtime, from, table, folder, console);
    co_return;
  }
  JoinedState whole(from, "`ziggurat ckpt save`");
  const ChunkTable table(whole.model(), kChunkTiles, *whole.content().state);
  co_await save_whole(runtime, whole, table, folder, console);
}

}  // namespace

int ckpt_save(const CkptCommand& command) {
  Console console;
  const auto runtime = Runtime::create({.threads = 0, .trace_path = ""});
  CheckpointFiles files(*runtime, command.paths.at(0));
  if (files.store() == nullptr) {
    throw UsageError(fmt::format(
        "ckpt save: {} is not a store; give the folder that `ziggurat train --store` made",
        command.paths.at(0)));
  }
  std::filesystem::create_directories(command.paths.at(1));
  runtime->reactor.block_on(save(*runtime, *files.store(), command.paths.at(1), console));
  return 0;
}

}  // namespace ziggurat::cli
