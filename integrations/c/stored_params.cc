// SPDX-License-Identifier: Apache-2.0
// integrations/c/stored_params.cc: finds in a store's layout the names that its embedder gave.
#include "integrations/c/stored_params.h"

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "base/error.h"
#include "core/sharding/chunk_table.h"
#include "core/sharding/packing.h"
#include "core/sharding/piece_layout.h"
#include "tiers/store/store_reader.h"

namespace ziggurat {
namespace {

/// Looks for a store on the reactor, because drives belong to the reactor's thread.
struct Look {
  Runtime& runtime;
  const EngineConfig& config;
  std::vector<std::unique_ptr<IoEngine>> drives{};
  std::optional<StoreSpec> found{};

  Task<> make() {
    std::vector<StripePlace> places;
    for (const StoreDirectory& directory : config.store) {
      if (!std::filesystem::is_directory(directory.path)) continue;
      drives.push_back(runtime.io_engine(runtime.reactor, directory.path));
      places.push_back({.io = *drives.back(), .observers = {}, .directory = directory.path});
    }
    std::exception_ptr error;
    try {
      Task<std::optional<StoreSpec>> looking =
          StoreReader::spec_of(runtime.reactor, std::move(places), runtime.ranks->rank());
      found = co_await std::move(looking);
    } catch (...) {
      error = std::current_exception();
    }
    drives.clear();
    if (error) std::rethrow_exception(error);
  }
};

}  // namespace

std::optional<ModelSpec> stored_params(Runtime& runtime, const EngineConfig& config) {
  Look look{.runtime = runtime, .config = config};
  runtime.reactor.block_on(look.make());
  if (!look.found) return std::nullopt;
  const std::string& layout = look.found->layout;
  ModelSpec model = ChunkTable::of_layout(layout, 0).model();
  if (const auto places = places_in(layout, model)) {
    auto next = places->begin();
    for (UnitSpec& unit : model.units)
      for (ParamSpec& param : unit.params) param.whole = *next++;
  }
  return unpacked_model(model);
}

std::string stored_params_json(const std::optional<ModelSpec>& model) {
  nlohmann::json all = nlohmann::json::array();
  if (!model) return all.dump();
  for (const UnitSpec& unit : model->units) {
    for (const ParamSpec& param : unit.params) {
      all.push_back({{"name", param.name},
                     {"shape", param.shape},
                     {"dtype", to_string(unit.dtype.value_or(model->dtype))},
                     {"whole", nullptr}});
      if (param.whole && !param.whole->name.empty())
        all.back()["whole"] = {{"name", param.whole->name}, {"shape", param.whole->shape}};
    }
  }
  return all.dump();
}

}  // namespace ziggurat
