// SPDX-License-Identifier: Apache-2.0
// core/engine/lent/lent_opening.cc: opens an engine of lent parameters: what may be lent, and the
// homes that it gets.
#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/numerics/typed_value.h"
#include "core/engine/lent/lent_engine_impl.h"
#include "core/engine/lent/lent_reshard.h"
#include "core/engine/state/store_rounding.h"
#include "core/sharding/piece_layout.h"

namespace ziggurat {
namespace {

/// Whether any parameter is streamed.
bool streams(const ModelSpec& model) {
  return std::ranges::any_of(model.units, [](const UnitSpec& unit) {
    return std::ranges::any_of(unit.params,
                               [](const ParamSpec& param) { return param.streamed.has_value(); });
  });
}

std::unique_ptr<LentEngine> opened(const ModelSpec& model, EngineConfig config, Runtime& runtime,
                                   std::span<const TypedSpan<std::byte>> params, Device* device,
                                   StateSource* source, const LoadOptions& options) {
  // The trainer judges a step before anything is updated, so there is nothing to guess.
  config.speculation = EngineConfig::Speculation::kNever;
  if (config.resume == EngineConfig::Resume::kReshard) {
    const LentOpening opening{model, config, runtime, params, device};
    if (std::unique_ptr<LentEngine> engine = resharded(opening)) return engine;
  }
  auto engine = std::make_unique<LentEngineImpl>(model, config, runtime, device);
  engine->open(params, source, options);
  return engine;
}

}  // namespace

std::unique_ptr<LentEngine> LentEngine::open(const ModelSpec& model, EngineConfig config,
                                             Runtime& runtime,
                                             std::span<const TypedSpan<std::byte>> params,
                                             Device* device) {
  return opened(model, std::move(config), runtime, params, device, nullptr, {});
}

std::unique_ptr<LentEngine> LentEngine::open(const ModelSpec& model, EngineConfig config,
                                             Runtime& runtime,
                                             std::span<const TypedSpan<std::byte>> params,
                                             StateSource& source, const LoadOptions& options,
                                             Device* device) {
  return opened(model, std::move(config), runtime, params, device, &source, options);
}

LentEngineImpl::LentEngineImpl(const ModelSpec& model, const EngineConfig& config, Runtime& runtime,
                               Device* device)
    : StateDoor(model, config, runtime, device, TrainingState::Division::kPieces) {}

void LentEngineImpl::open(std::span<const TypedSpan<std::byte>> params, StateSource* source,
                          const LoadOptions& options) {
  state_.runtime().reactor.block_on(opening(params, source, options));
}

Task<> LentEngineImpl::opening(std::span<const TypedSpan<std::byte>> params, StateSource* source,
                               LoadOptions options) {
  lent_ = params;
  Task<> its = state_.open(*this, source, options);
  co_await std::move(its);
  lent_ = {};
  steps_ = state_.counts();
}

void LentEngineImpl::validate() {
  const EngineConfig& config = state_.config();
  ModelSpec& model = state_.model();
  const auto require = [](bool good, const std::string& message) {
    if (!good) throw Error(ErrorCode::kInvalidArgument, message);
  };
  require(!config.checkpoint.saves,
          "an engine of lent parameters sets no memory aside for checkpoints: leave "
          "EngineConfig::Checkpoint::saves off, and save with begin_copy()");
  require(config.clip_norm == 0,
          fmt::format("`clip={}` cannot be used with lent gradients, because their trainer clips "
                      "them itself: leave this setting out",
                      config.clip_norm));
  require(config.param_groups.empty(),
          "`param_groups` cannot be used with lent parameters: give each step its groups instead");
  const bool chosen = config.placement.automatic;
  require(chosen || (config.placement.optimizer != Tier::kDevice &&
                     config.placement.device_record_bytes == 0),
          fmt::format("`placement={}` cannot be used with lent parameters: keep optimizer state on "
                      "host or nvme",
                      to_string(config.placement)));
  const bool trains = !std::ranges::all_of(model.units, &UnitSpec::frozen);
  require(!config.store.empty() || chosen || config.placement.optimizer == Tier::kHost || !trains,
          "`store` is missing: give a directory, because optimizer state is not on the host");
  require(!config.store.empty() || config.placement.grads != Tier::kNvme,
          "`store` is missing: give a directory, because sums of gradients are on NVMe");
  require(lent_.size() == model.units.size(),
          fmt::format("{} parameters are lent, but the model has {} units: lend one for each",
                      lent_.size(), model.units.size()));
  const std::vector<std::uint64_t>& firsts = config.first_elements;
  require(firsts.empty() || firsts.size() == model.units.size(),
          fmt::format(
              "`first_elements` has {} numbers, but the model has {} parameters: give one for each",
              firsts.size(), model.units.size()));
  std::set<std::string_view> names;
  for (std::size_t u = 0; u < model.units.size(); ++u) {
    UnitSpec& unit = model.units[u];
    require(unit.params.size() == 1,
            fmt::format("unit '{}' has {} parameters: give each lent parameter a unit of its own",
                        unit.name, unit.params.size()));
    require(unit.count() > 0,
            fmt::format("parameter '{}' has no elements: lend only those that have some",
                        unit.params[0].name));
    require(
        names.insert(unit.params[0].name).second,
        fmt::format("two parameters have the name '{}': give each its own", unit.params[0].name));
    unit.params[0].lent = static_cast<ParamId>(u);
    require(!config.counts_steps || unit.params[0].group == u,
            fmt::format("parameter '{}' is in group {}, but the engine counts steps: give each "
                        "parameter the group of its own number",
                        unit.params[0].name, unit.params[0].group));
    require_frozen_last(model, u);
    require_place(unit.params[0]);
    if (!firsts.empty()) unit.params[0].first_element = firsts[u];
    const DType dtype = unit.dtype.value_or(model.dtype);
    const TypedSpan<std::byte>& lent = lent_[u];
    const bool left_out = unit.params[0].streamed && lent.bytes.empty();
    require(
        left_out || (lent.dtype == dtype && lent.count() == unit.count()),
        fmt::format("unit '{}': {} elements of {} are lent, but the unit has {} of {}", unit.name,
                    lent.count(), to_string(lent.dtype), unit.count(), to_string(dtype)));
    require_compatible(config.optimizer.state.format, param_rounding(config.optimizer),
                       dtype == DType::kBFloat16);
  }
  require_streams(model);
}

/// Notes that a frozen parameter is constant. Throws unless it may be frozen, or if a trained one
/// comes after a frozen one.
void LentEngineImpl::require_frozen_last(ModelSpec& model, std::size_t param) {
  ParamSpec& its = model.units[param].params[0];
  its.constant = its.frozen;
  const char* why = nullptr;
  if (its.frozen && !its.streamed)
    why =
        "is frozen, but in the caller's memory, and the engine would have nothing to do with it: "
        "leave it out";
  if (!its.frozen && param > 0 && model.units[param - 1].params[0].frozen)
    why = "is trained, but follows a frozen one: give the frozen parameters after all others";
  if (why == nullptr) return;
  throw Error(ErrorCode::kInvalidArgument, fmt::format("parameter '{}' {}", its.name, why));
}

/// Throws unless units of streamed parameters are numbered without gaps, and there is a device.
void LentEngineImpl::require_streams(const ModelSpec& model) const {
  std::set<StreamedUnit> units;
  for (const UnitSpec& unit : model.units)
    if (unit.params[0].streamed) units.insert(*unit.params[0].streamed);
  for (const WholeParam& whole : state_.config().wholes) units.insert(whole.unit);
  if (units.empty()) return;
  if (*units.rbegin() != units.size() - 1) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the streamed parameters name {} units, but the largest number is {}: "
                            "number units from 0, without gaps",
                            units.size(), *units.rbegin()));
  }
  if (!state_.has_device()) {
    throw Error(ErrorCode::kInvalidArgument,
                "parameters are streamed, but there is no device: give one");
  }
  if (state_.config().store.empty() && state_.config().placement.params == Tier::kNvme) {
    throw Error(ErrorCode::kInvalidArgument,
                "`store` is missing: give a directory, because parameters are streamed from NVMe");
  }
}

void LentEngineImpl::plan_device() {
  if (streams(state_.model()) || !state_.config().wholes.empty())
    streamed_ = std::make_unique<StreamedParams>(state_);
}

Hand::Homes LentEngineImpl::make_homes(Context& context, const std::vector<StripePlace>& places) {
  context.lent.lend(lent_);
  if (state_.config().placement.grads == Tier::kNvme)
    sums_ = std::make_unique<GradSums>(context, places, lent_.size());
  Homes homes;
  homes.grads = GradHome::create_lent(context, sums_.get());
  grads_ = homes.grads.get();
  if (streamed_) {
    homes.params = streamed_->make_home(context, places);
  } else {
    homes.params = ParamHome::create_lent(context);
  }
  return homes;
}

Task<> LentEngineImpl::build() {
  if (streamed_) co_await streamed_->build(state_.context());
}

/// Makes the masters of a chunk in a new store from the lent parameters.
bool LentEngineImpl::make_masters(ChunkId id, std::span<float> masters) const {
  bool given = false;
  for (const ParamRun& run : state_.table().param_runs(id)) {
    if (lent_[run.lent].bytes.empty()) continue;  // streamed, and written later
    given = true;
    const TypedSpan<std::byte> params = lent_[run.lent].subspan(run.first, run.count);
    for (std::size_t i = 0; i < run.count; ++i)
      masters[run.begin + i] = value_at(params.dtype, params.bytes.data(), i);
  }
  return given;
}

}  // namespace ziggurat
