// SPDX-License-Identifier: Apache-2.0
// integrations/c/checkpoint_calls.cc: the C functions of checkpoints.
#include <fmt/format.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "integrations/c/c_call.h"
#include "integrations/c/embedded_checkpoint.h"
#include "integrations/c/embedded_save.h"
#include "integrations/c/engine_calls.h"
#include "integrations/c/settings_json.h"
#include "integrations/c/wrong.h"
#include "integrations/c/ziggurat.h"

namespace {

using ziggurat::bytes_of;
using ziggurat::EmbeddedCheckpoint;
using ziggurat::EmbeddedSaving;
using ziggurat::engines;
using ziggurat::guarded;
using ziggurat::OpenEngine;
using ziggurat::required;
using ziggurat::runtimes;
using ziggurat::wrong;

/// A checkpoint that a caller has open. It keeps its runtime, which cannot be destroyed meanwhile.
struct OpenCheckpoint {
  std::shared_ptr<ziggurat::Runtime> runtime;
  std::unique_ptr<EmbeddedCheckpoint> checkpoint;
};

/// Never destroyed, as runtimes().
ziggurat::Handles<OpenCheckpoint>& checkpoints() {
  static auto& all = *new ziggurat::Handles<OpenCheckpoint>("checkpoint");
  return all;
}

/// A save that a caller has begun. It keeps its runtime, but not the engines.
struct BegunSave {
  std::shared_ptr<ziggurat::Runtime> runtime;
  std::unique_ptr<EmbeddedSaving> saving;

  ~BegunSave() {
    if (!saving) return;
    if (!waited_for) say_failure();
    // Calls to a target that hangs use the save and its runtime until they return.
    if (!saving->hangs()) return;
    static_cast<void>(saving.release());
    static_cast<void>(*new std::shared_ptr<ziggurat::Runtime>(std::move(runtime)));
  }
  /// Waits for a save that nobody has waited for, and says if it has failed.
  void say_failure() const {
    try {
      saving->end();
    } catch (const std::exception& error) {
      ziggurat::log().warn("the checkpoint of step {} is not saved: {}", saving->step(),
                           error.what());
    }
  }
  std::string end() {
    waited_for = true;
    return saving->end();
  }

  std::atomic<bool> waited_for = false;
  BegunSave() = default;
  BegunSave(const BegunSave&) = delete;
  BegunSave& operator=(const BegunSave&) = delete;
};

/// Never destroyed, as runtimes().
ziggurat::Handles<BegunSave>& saves() {
  static auto& all = *new ziggurat::Handles<BegunSave>("save");
  return all;
}

/// A save as a caller describes it, with the engines that it uses while it begins.
struct AskedSave {
  std::vector<std::shared_ptr<OpenEngine>> kept;
  ziggurat::EmbeddedSave save;
};

AskedSave asked_save(const std::shared_ptr<ziggurat::Runtime>& on,
                     const ziggurat_save_options* options, const char* content) {
  AskedSave asked;
  const ziggurat_save_options its = ziggurat::copied(options, "options");
  std::vector<ziggurat::EmbeddedEngine*> saved;
  for (std::uint32_t e = 0; e < its.engine_count; ++e) {
    asked.kept.push_back(engines().find(required(its.engines, "options.engines")[e]));
    if (asked.kept.back()->runtime != on)
      throw wrong(fmt::format(
          "options.engines[{}] is an engine of another runtime: save its state on that runtime",
          e));
    saved.push_back(asked.kept.back()->engine.get());
  }
  std::vector<ziggurat::TypedSpan<std::byte>> values;
  for (const ziggurat_memory& memory :
       ziggurat::array_of(its.values, its.value_count, "options.values"))
    values.push_back(ziggurat::memory_of(&memory, "options.values"));
  asked.save = ziggurat::EmbeddedSave::parse(required(content, "content"), saved, values);
  const std::span<const std::byte> blob = bytes_of(its.blob, its.blob_bytes, "options.blob");
  asked.save.content.blob.assign(blob.begin(), blob.end());
  return asked;
}

}  // namespace

ziggurat_status ziggurat_save_checkpoint(ziggurat_runtime runtime,
                                         const ziggurat_save_options* options,
                                         const char* content) {
  return guarded([&] {
    const std::shared_ptr<ziggurat::Runtime> on = runtimes().find(runtime);
    AskedSave asked = asked_save(on, options, content);
    BegunSave save;
    save.runtime = on;
    save.saving = std::make_unique<EmbeddedSaving>(*on, std::move(asked.save),
                                                   EmbeddedSaving::Beside::kNothing);
    save.end();
  });
}

ziggurat_status ziggurat_save_begin(ziggurat_runtime runtime, const ziggurat_save_options* options,
                                    const char* content, ziggurat_save* save) {
  return guarded([&] {
    *required(save, "save") = 0;
    auto begun = std::make_shared<BegunSave>();
    begun->runtime = runtimes().find(runtime);
    AskedSave asked = asked_save(begun->runtime, options, content);
    begun->saving = std::make_unique<EmbeddedSaving>(*begun->runtime, std::move(asked.save),
                                                     EmbeddedSaving::Beside::kSteps);
    *save = saves().add(std::move(begun));
  });
}

ziggurat_status ziggurat_save_under_way(ziggurat_save save, int32_t* under_way) {
  return guarded(
      [&] { *required(under_way, "under_way") = saves().find(save)->saving->under_way() ? 1 : 0; });
}

ziggurat_status ziggurat_save_wait(ziggurat_save save, char* directory, uint64_t capacity_bytes,
                                   uint64_t* needed_bytes) {
  return guarded([&] {
    ziggurat::give_text(saves().find(save)->end(), directory, capacity_bytes, needed_bytes);
  });
}

ziggurat_status ziggurat_save_close(ziggurat_save save) {
  return guarded([&] { saves().take(save); });
}

ziggurat_status ziggurat_checkpoint_open(ziggurat_runtime runtime, const char* path,
                                         ziggurat_checkpoint* checkpoint) {
  return guarded([&] {
    *required(checkpoint, "checkpoint") = 0;
    auto open = std::make_shared<OpenCheckpoint>();
    open->runtime = runtimes().find(runtime);
    open->checkpoint = std::make_unique<EmbeddedCheckpoint>(*open->runtime, required(path, "path"));
    *checkpoint = checkpoints().add(std::move(open));
  });
}

ziggurat_status ziggurat_checkpoint_close(ziggurat_checkpoint checkpoint) {
  return guarded([&] { checkpoints().take(checkpoint); });
}

ziggurat_status ziggurat_checkpoint_content(ziggurat_checkpoint checkpoint, char* text,
                                            uint64_t capacity_bytes, uint64_t* needed_bytes) {
  return guarded([&] {
    ziggurat::give_text(checkpoints().find(checkpoint)->checkpoint->description(), text,
                        capacity_bytes, needed_bytes);
  });
}

ziggurat_status ziggurat_checkpoint_blob(ziggurat_checkpoint checkpoint, void* blob,
                                         uint64_t capacity_bytes) {
  return guarded([&] {
    const std::shared_ptr<OpenCheckpoint> open = checkpoints().find(checkpoint);
    const std::vector<std::byte>& its = open->checkpoint->reader().content().blob;
    ziggurat::give_blob_bytes(its, blob, capacity_bytes);
  });
}

ziggurat_status ziggurat_checkpoint_read(ziggurat_checkpoint checkpoint, uint64_t tensor,
                                         uint64_t first, const ziggurat_memory* values) {
  return guarded([&] {
    checkpoints()
        .find(checkpoint)
        ->checkpoint->read(tensor, first, ziggurat::memory_of(values, "values"));
  });
}

ziggurat_status ziggurat_engine_load(ziggurat_runtime runtime, const ziggurat_param* params,
                                     uint64_t count, const char* settings,
                                     ziggurat_checkpoint checkpoint, const char* load,
                                     ziggurat_engine* engine) {
  return guarded([&] {
    *required(engine, "engine") = 0;
    const std::shared_ptr<OpenCheckpoint> from = checkpoints().find(checkpoint);
    auto open = std::make_shared<OpenEngine>();
    open->runtime = runtimes().find(runtime);
    if (from->runtime != open->runtime)
      throw wrong("the checkpoint was opened on another runtime: open it on this one");
    const std::vector<ziggurat::EmbeddedParam> all = ziggurat::params_of(params, count);
    std::vector<std::uint64_t> counts;
    for (const ziggurat::EmbeddedParam& param : all)
      if (!param.frozen) counts.push_back(param.count());
    ziggurat::EmbeddedParts parts = ziggurat::EmbeddedParts::parse(required(load, "load"), counts);
    const ziggurat::EmbeddedLoad its{.source = from->checkpoint->reader(),
                                     .parts = std::move(parts.parts),
                                     .steps = std::move(parts.steps),
                                     .weights_only = parts.weights_only,
                                     .continues_line = from->checkpoint->is_newest_of_line()};
    open->engine = std::make_unique<ziggurat::EmbeddedEngine>(
        *open->runtime, all, ziggurat::engine_config_of(required(settings, "settings")), its);
    *engine = engines().add(std::move(open));
  });
}
