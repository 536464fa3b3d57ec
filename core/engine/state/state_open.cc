// SPDX-License-Identifier: Apache-2.0
// core/engine/state/state_open.cc: opens an engine from a configuration: first the store, then the
// budgets, the parts of the engine, and the state.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/runtime/for_each.h"
#include "core/engine/state/store_rounding.h"
#include "core/engine/state/training_state.h"
#include "core/plan/auto_placement.h"
#include "core/sharding/piece_layout.h"
#include "core/sharding/stored_records.h"
#include "tiers/store/record_hash.h"
#include "tiers/store/store_succession.h"

namespace ziggurat {
namespace {

/// Throws if the ranks' sources are at different steps. Each rank has opened the source itself. If
/// another run is writing to it, or if its drive fails sometimes, ranks may have found different
/// steps.
Task<> require_same_step(Quorum& ranks, std::uint64_t step, const std::string& place) {
  const std::uint64_t oldest = co_await ranks.min(step);
  const std::uint64_t newest = co_await ranks.max(step);
  if (oldest == newest) co_return;
  throw Error(ErrorCode::kUnavailable,
              fmt::format("{}: the ranks found different newest steps ({} to {}). Start again. If "
                          "one rank finds an older step every time, check the store with `ziggurat "
                          "ckpt verify`, and check the drive as that rank sees it",
                          place, oldest, newest));
}

}  // namespace

TrainingState::TrainingState(const ModelSpec& model, const EngineConfig& config, Runtime& runtime,
                             Device* device, Division division)
    : model_(model),
      config_(config),
      division_(division),
      runtime_(runtime),
      device_(device),
      cancel_(runtime.reactor),
      lent_memory_(runtime.reactor, cancel_),
      stored_(cancel_) {}

Task<> TrainingState::open(Hand& hand, StateSource* source, LoadOptions options) {
  hand_ = &hand;
  source_ = source;
  load_options_ = std::move(options);
  std::exception_ptr error;
  try {
    co_await open_all();
  } catch (...) {
    error = std::current_exception();
  }
  source_ = nullptr;
  if (!error) co_return;
  if (followed_from_another(error)) error = co_await first_cause(error);
  fail(error);
  std::rethrow_exception(error);
}

Task<> TrainingState::open_all() {
  validate();
  group_count_ = group_count(model_);
  open_channels();
  if (of_pieces() && runtime_.ranks->world_size() > 1) service_ = make_service();
  co_await agree_on_settings();
  co_await open_store();
  if (storage_->store) storage_->store->set_copies(copies_elsewhere());
  co_await build_floors();
  const Nanoseconds begin = runtime_.reactor.clock().now();
  if (resumed_) {
    co_await load_state();
  } else {
    co_await create_state();
  }
  co_await fill_homes();
  state_seconds_ = 1e-9 * static_cast<double>((runtime_.reactor.clock().now() - begin).count());
  hand_->opened();
  for (UnitId u = 0; u < table_->unit_count(); ++u) hand_->updated(u, generation_);
  gates_->begin_generation(generation_);
  hand_->begin_generation(generation_);
  stored_at_ = runtime_.reactor.clock().now();
  if (!service_) co_return;
  service_->made(generation_);
  co_await service_->open();
}

void TrainingState::open_channels() {
  const RankChannels::Groups groups{
      .shard = shard_group(), .node = strategy_->hpz, .exchanges = exchanges()};
  channels_ = std::make_unique<RankChannels>(*runtime_.ranks, place_, groups);
}

void TrainingState::open_storage() {
  storage_ = Storage::open(runtime_, *channels_->store, config_.store);
}

Task<> TrainingState::end_succession() {
  StoreSuccession succession(runtime_.reactor, storage_->places);
  Task<> done =
      first_rank_does(storage_->quorum, succession.recover(), "finish resharding its store");
  co_await std::move(done);
  notes_.insert(notes_.end(), succession.notes().begin(), succession.notes().end());
}

Task<bool> TrainingState::store_found() {
  const bool here = StripedStore::exists(storage_->places, storage_->ranks.rank());
  co_return co_await storage_->quorum.max(here ? 1 : 0) != 0;
}

static_assert(kBlobRoomBytes == kBlobHeadBytes + kBlobBytesMax);

Task<> TrainingState::open_store() {
  if (!trains()) config_.placement.optimizer = Tier::kHost;  // there is no state
  open_storage();
  // Compute takes a little of the device's memory, so it is made before the rest is divided. What a
  // trainer lends is computed on by the CPU alone.
  if (device_ != nullptr && !of_pieces()) {
    compute_ = make_compute(*device_, runtime_.reactor, runtime_.jobs(),
                            {.round_count_max = kChunkTilesMax * kTileElements,
                             .quantizes = sharding().quantization.gradients()});
  }
  if (keeps_store()) co_await end_succession();
  const bool found = keeps_store() && co_await store_found();
  if (found && config_.resume == EngineConfig::Resume::kNew) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("`store={}`: there is a store already. Give another directory, `resume=auto` "
                    "to train on from that store, or `resume=never` to replace it",
                    storage_->paths()));
  }
  if (found && config_.resume != EngineConfig::Resume::kNever) {
    co_await open_stored();
  } else {
    // The budget is checked before a byte is written. All ranks that divide a model use the same
    // chunks: the smallest that a rank needs.
    Task<> choosing = choose_lent_placement_if_automatic(std::nullopt);
    co_await std::move(choosing);
    choose_placement_if_automatic();
    co_await make_table();
  }
  plan_ = plan_host(*table_, config_.placement, reduction(),
                    {config_.host_budget_bytes, config_.checkpoint.saves});
  require_host_budget(plan_, config_.host_budget_bytes);
  config_.host_budget_bytes -= plan_.save_bytes;  // the pool has the rest
  hand_->plan_device();
  if (resumed_ || !keeps_store()) co_return;
  co_await create_store();
}

/// Opens the store that is there, whose chunks are used.
Task<> TrainingState::open_stored() {
  Task<> opening = unless_lost([](TrainingState& self) -> Task<> {
    StripedStore::Environment environment = self.storage_->environment(self.runtime_);
    Task<std::unique_ptr<StripedStore>> its = StripedStore::open(std::move(environment));
    self.storage_->store = co_await std::move(its);
  }(*this));
  co_await std::move(opening);
  const StoreState& state = storage_->store->state();
  Task<> choosing = choose_lent_placement_if_automatic(state.layout);
  co_await std::move(choosing);
  if (of_pieces()) pack(state.layout);
  table_ = ChunkTable::from_layout(model_, state.layout, config_.optimizer.state, sharding());
  if (!of_pieces() && is_of_pieces(state.layout)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("`store={}` was made by a trainer that lends its parameters, and "
                            "only the trainer that made it can use it: give another directory",
                            storage_->paths()));
  }
  if (of_pieces()) require_places(state.layout);
  rounding_ = rounding_of_store(config_.optimizer, table_->rounding());
  if (leaves_host_budget()) choose_host_budget(*table_);
  check_identity(state);
  require_slots(state);
  resumed_ = true;
  choose_placement_if_automatic();
}

/// Whether there is a store. If all parameters of a trainer that lends are frozen, the directories
/// only have what is placed on NVMe.
bool TrainingState::keeps_store() const { return !config_.store.empty() && trains(); }

/// Whether some parameter is not frozen by a trainer that lends.
bool TrainingState::trains() const { return std::ranges::any_of(model_.units, &UnitSpec::stored); }

/// Whether a trainer that lends leaves the host budget to the engine.
bool TrainingState::leaves_host_budget() const {
  return of_pieces() && config_.host_budget_bytes == 0;
}

/// Takes as much host memory as a run uses well.
void TrainingState::choose_host_budget(const ChunkTable& table) {
  config_.host_budget_bytes =
      plan_host(table, config_.placement, reduction(), {0, config_.checkpoint.saves})
          .comfortable_bytes();
}

/// Makes the table of a new store.
Task<> TrainingState::make_table() {
  if (of_pieces()) pack(std::nullopt);
  const StateKind& kind = config_.optimizer.state;
  const Sharding cut = sharding();
  const ReductionSettings exchanged = reduction();
  if (leaves_host_budget()) choose_host_budget({model_, kChunkTilesMax, kind, cut});
  const std::uint64_t tiles = choose_chunk_tiles({.model = model_,
                                                  .state = kind,
                                                  .sharding = cut,
                                                  .placement = config_.placement,
                                                  .reduction = exchanged,
                                                  .saves = config_.checkpoint.saves},
                                                 config_.host_budget_bytes);
  const std::uint64_t chunk_tiles = of_pieces() ? tiles : co_await storage_->quorum.min(tiles);
  const std::optional<Roundings> named =
      source_ == nullptr
          ? rounding_of_new_store(config_.optimizer)
          : rounding_of_copy(config_.optimizer, source_->content(), load_options_.in_place);
  table_.emplace(model_, chunk_tiles, kind, cut, named);
  rounding_ = rounding_of_store(config_.optimizer, named);
}

void TrainingState::moved(const std::vector<std::string>& directories) {
  for (std::size_t i = 0; i < directories.size(); ++i) config_.store[i].path = directories[i];
  storage_->moved(directories);
}

Task<> TrainingState::create_store() {
  StripedStore::Environment environment = storage_->environment(runtime_);
  StoreSpec spec{.layout = of_pieces() ? layout_of_pieces(table_->layout(), table_->model())
                                       : table_->layout(),
                 .run_identity = config_.run_identity,
                 .numerics_fingerprint = config_.numerics_fingerprint,
                 .record_bytes = table_->record_bytes(),
                 .constant = table_->constant_chunks(),
                 .record_format = table_->record_format(),
                 .slots = static_cast<std::uint32_t>(config_.slots),
                 .blob_capacity_bytes = kBlobHeadBytes + blob_room_bytes()};
  Task<std::unique_ptr<StripedStore>> creating =
      StripedStore::create(std::move(environment), std::move(spec));
  storage_->store = co_await std::move(creating);
}

/// Chooses the placement before anything is sized. For an existing store its chunks are used.
void TrainingState::choose_placement_if_automatic() {
  if (!config_.placement.automatic) return;
  const Account device = device_->account();
  PlacementChoice choice =
      choose_placement({.model = model_,
                        .state = config_.optimizer.state,
                        .sharding = sharding(),
                        .reduction = reduction(),
                        .device = device_request(),
                        .slots = config_.slots,
                        .saves = config_.checkpoint.saves,
                        .budgets = {.device_bytes = device.capacity_bytes() - device.used_bytes(),
                                    .host_bytes = config_.host_budget_bytes},
                        .chunk_tiles = table_ ? table_->largest_chunk_count() / kTileElements : 0});
  config_.placement = choice.placement;
  notes_.push_back(std::move(choice.why));
}

void TrainingState::make_pool() {
  const std::vector<int> drive_nodes =
      storage_->store ? storage_->chunk_drive_nodes() : std::vector<int>();
  node_plan_ = plan_nodes(*table_, plan_,
                          {.topology = runtime_.topology,
                           .worker_nodes = runtime_.worker_nodes,
                           .chunk_drive_nodes = drive_nodes,
                           .placement = config_.placement,
                           .host_budget_bytes = config_.host_budget_bytes});
  PinnedPoolOptions options;
  options.budget_bytes = config_.host_budget_bytes;
  options.reserves = plan_.reserves;
  options.nodes = node_plan_.pool;
  options.memory_policy = runtime_.memory_policy.get();
  options.metrics = &runtime_.metrics;
  options.absent = runtime_.absent;
  options.cancel = &cancel_;
  pool_ = PinnedPool::create(runtime_.reactor, std::move(options));
  for (const auto& drive : storage_->drives) drive->register_memory(pool_->mapping());
  if (device_ != nullptr) pool_->keep_registered(device_->register_host_memory(pool_->mapping()));
}

void TrainingState::make_context() {
  if (device_ != nullptr) {
    to_device_ = device_->create_stream("host to device");
    to_host_ = device_->create_stream("device to host");
  }
  tasks_.emplace(runtime_.reactor);
  local_tasks_.emplace(runtime_.reactor);
  gates_.emplace(cancel_, runtime_.reactor.clock(), runtime_.metrics, table_->unit_count());
  context_.emplace(
      Context{.reactor = runtime_.reactor,
              .workers = runtime_.jobs(),
              .metrics = runtime_.metrics,
              .trace = runtime_.trace.get(),
              .device = device_,
              .to_device = to_device_.get(),
              .to_host = to_host_.get(),
              .compute = compute_.get(),
              .pool = *pool_,
              .ranks = *channels_,
              .table = *table_,
              .placement = config_.placement,
              .rounding = {.rounding = rounding_.params, .seed = config_.optimizer.rounding_seed},
              .cancel = cancel_,
              .tasks = *tasks_,
              .local_tasks = *local_tasks_,
              .gates = *gates_,
              .lent = lent_memory_,
              .chunk_nodes = node_plan_.chunk_nodes,
              .fail = [this](std::exception_ptr error) { fail(error); }});
}

Task<> TrainingState::build_floors() {
  make_pool();
  make_context();
  Hand::Homes made = hand_->make_homes(*context_, storage_->places);
  params_ = std::move(made.params);
  grads_ = std::move(made.grads);
  const RecordPlan stays{.device_chunks = plan_.device_chunks,
                         .kept_item_bytes = plan_.kept_item_bytes};
  records_ = std::make_unique<RecordHome>(*context_, stays);
  staging_ = std::make_unique<DeviceStaging>(*context_, plan_.device_chunks);
  co_await hand_->build();
  open_saves();
  describe();
}

DeviceRequest TrainingState::device_request() const {
  return {
      .trainer = {.device_bytes = config_.trainer_device_bytes, .held = config_.trainer_held_units},
      .keep_gathered = strategy_->keeps_params_to_backward,
      .out_of_reach = out_of_reach()};
}

Task<Lease> TrainingState::state_lease(ChunkId id, std::uint64_t size_bytes) {
  if (size_bytes == 0) co_return Lease{};
  const LeaseRequest request{.purpose = Purpose::kOptimizer,
                             .size_bytes = size_bytes,
                             .need = {.generation = generation_, .position = id},
                             .holder = "opening",
                             .numa_node = context_->node_of(id)};
  co_return co_await pool_->acquire(request);
}

Task<TrainingState::ItemMemory> TrainingState::item_of(ChunkId id) {
  ItemMemory memory;
  memory.lease = co_await state_lease(id, WorkMemory::lease_bytes(homes(), *table_, id));
  memory.work = WorkMemory::of(homes(), *table_, id, memory.lease.bytes());
  co_return std::move(memory);
}

/// Makes the parameters at home from a record, in the memory of `work`.
Task<> TrainingState::make_params(ChunkId id, ParamSteps steps, std::span<const std::byte> record,
                                  const WorkMemory& work) {
  const std::vector<ParamRun> packed = packed_runs(id);
  co_await params_->publish_record(id, steps, record, work.param, packed);
}

/// Makes the parameters at home, and the record where it stays, from the record of generation_ in
/// `work`.
Task<> TrainingState::take_record(ChunkId id, const WorkMemory& work) {
  co_await make_params(id, steps_in(generation_), work.record, work);
  if (records_->updated_on_device(id)) co_await records_->bring_home(id, work.record);
  records_->set_holds(id, generation_);
}

/// Takes the number of steps of each parameter from the blob with which the engine was opened.
void TrainingState::read_counts() {
  if (!config_.counts_steps) return;
  if (generation_ > 0 && resumed_blob_.empty()) {
    throw Error(
        ErrorCode::kDataLoss,
        "the steps of each parameter were not counted when the state was made, but are now: "
        "open it with an engine that does not count");
  }
  counts_ = StepsBlob::read(resumed_blob_, stored_count()).steps;
}

void TrainingState::make_sweep() {
  if (of_pieces()) writes_.emplace();
  OptimizerSweep::Settings settings{
      .work_items = plan_.items,
      .seal_every = records_->through_store() ? config_.durable_every_steps : 0,
      .before_seal = config_.before_seal,
      .unsealed = unsealed_,
      .unmade = unmade_,
      .initial_accumulator = config_.optimizer.initial_accumulator};
  OptimizerSweep::Parts parts{
      .homes = homes(),
      .staging = *staging_,
      .store = storage_->store.get(),
      .ranks = storage_->quorum,
      .unit_updated = [this](UnitId unit,
                             std::uint64_t generation) { hand_->updated(unit, generation); },
      .param_steps = [this](std::uint64_t generation) { return steps_in(generation); },
      .writes = writes_ ? &*writes_ : nullptr,
      .watch = copier_.get()};
  sweep_ = std::make_unique<OptimizerSweep>(*context_, std::move(parts), std::move(settings),
                                            generation_);
  if (copier_) copier_->set_sweep(*sweep_);
}

void TrainingState::report_progress(ChunkId id, const char* what) {
  opened_bytes_ += table_->chunk(id).record_bytes();
  if (config_.progress) config_.progress(what, opened_bytes_, table_->total_record_bytes());
}

/// Returns how many chunks are begun at once by create_state() and load_state(). The number is
/// limited because each coroutine that waits for memory has a stack.
std::size_t TrainingState::chunks_at_once() const {
  return std::max<std::size_t>(plan_.items, kWorkItemsWanted) + runtime_.jobs().threads();
}

Task<> TrainingState::create_state() {
  begin_load();
  if (loader_) co_await require_same_step(storage_->quorum, loader_->step(), source_->place());
  read_counts();
  unmade_ = of_pieces() && !loader_ && records_->through_store();
  unsealed_ = storage_->store && !co_await seals_its_beginning();
  StripedStore* const store = unsealed_ ? nullptr : storage_->store.get();
  const std::function<Task<>(std::size_t)> create = [&](std::size_t id) {
    return create_chunk(static_cast<ChunkId>(id), store);
  };
  co_await for_each_index(runtime_.reactor, table_->stored_chunks().size(), chunks_at_once(),
                          create);
  loader_.reset();
  begin_line();
  last_blob_ = wrap_blob(generation_, line_record_, resumed_blob_);
  const std::function<void()> before_seal = [this] {
    if (config_.before_seal) config_.before_seal(generation_);
  };
  if (store != nullptr) {
    co_await store->commit(0, last_blob_, before_seal);
    store->set_durable_everywhere(0);
  }
  make_sweep();
}

/// Whether the store has what the run begins with. It has not while records are still to be made,
/// nor if some rank's trainer writes its parameters only now: a store of zeros would be resumed.
Task<bool> TrainingState::seals_its_beginning() {
  if (unmade_) co_return false;
  if (!of_pieces() || loader_) co_return true;
  const bool zeros = std::ranges::any_of(model_.units, [](const UnitSpec& unit) {
    return unit.stored() && unit.params.front().streamed.has_value();
  });
  co_return co_await storage_->quorum.max(zeros ? 1 : 0) == 0;
}

Task<> TrainingState::create_chunk(ChunkId id, StripedStore* store) {
  const Chunk& chunk = table_->chunk(id);
  if (unmade_ && !table_->has_home(chunk.unit)) co_return;
  const ItemMemory memory = co_await item_of(id);
  bool given = true;
  std::uint64_t hash = 0;
  const std::uint64_t seed = store != nullptr ? store->write_seed(id, 0) : 0;
  if (loader_) co_await loader_->load(id, memory.work.record);
  const std::function<void()> job = [&] {
    if (loader_) {
      if (store != nullptr) hash = record_hash(memory.work.record, seed, table_->record_format(id));
      return;
    }
    std::vector<float> masters(chunk.count);
    given = hand_->make_masters(id, std::span(masters).first(table_->real_count(id)));
    if (chunk.constant) {
      std::memcpy(memory.work.record.data(), masters.data(), memory.work.record.size());
    } else {
      write_record(table_->state(id), masters, memory.work.record,
                   config_.optimizer.initial_accumulator);
    }
    if (store != nullptr) hash = record_hash(memory.work.record, seed, table_->record_format(id));
  };
  co_await context_->run_near(id, {"initialize", memory.work.record.size()}, job);
  if (unmade_ && !given && params_->begins_with_zeros()) co_return;
  if (store != nullptr) co_await store->write(id, 0, memory.work.record, hash);
  if (unmade_) {
    co_await make_params(id, steps_in(generation_), memory.work.record, memory.work);
  } else if (!table_->has_home(chunk.unit) && !loader_) {
    records_->set_holds(id, generation_);  // made from the parameters that are there
  } else {
    co_await take_record(id, memory.work);
  }
  if (!unmade_) report_progress(id, "writing generation 0");
}

/// Brings what the trainer has given of those parameters home that no store has.
Task<> TrainingState::fill_homes() {
  const std::size_t stored = table_->stored_chunks().size();
  const std::function<Task<>(std::size_t)> fill = [&](std::size_t i) {
    return fill_home(static_cast<ChunkId>(stored + i));
  };
  co_await for_each_index(runtime_.reactor, table_->chunks().size() - stored, chunks_at_once(),
                          fill);
}

Task<> TrainingState::fill_home(ChunkId id) {
  std::vector<float> masters(table_->chunk(id).count);
  const std::span<float> real = std::span(masters).first(table_->real_count(id));
  bool given = true;
  const std::function<void()> job = [&] { given = hand_->make_masters(id, real); };
  co_await context_->run_near(id, {"initialize", real.size_bytes()}, job);
  if (!given && params_->begins_with_zeros()) co_return;
  const ItemMemory memory = co_await item_of(id);
  co_await make_params(id, {.generation = 0}, std::as_bytes(std::span(masters)), memory.work);
}

}  // namespace ziggurat
