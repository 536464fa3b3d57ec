// SPDX-License-Identifier: Apache-2.0
// tests/core/piece_world.h: ranks in one process that lend pieces of whole tensors, cut in a way of
// their own, with one store in one directory; and that store as whole tensors.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/checkpoint/joined_state.h"
#include "core/checkpoint/tensor_piece.h"
#include "core/engine/lent_engine.h"
#include "tests/core/lent_kinds.h"
#include "tests/core/open_store.h"
#include "tests/core/ranks_harness.h"

namespace ziggurat::testing {

struct WholeTensor {
  std::string name;
  std::vector<std::int64_t> shape;
  std::uint64_t count() const { return whole_box(shape).count(); }
};
/// Small ones that share records, one element, and several records' worth.
inline const std::vector<WholeTensor> kWholes{{"embedding", {300, 100}}, {"bias", {7}},
                                              {"weight", {64, 512}},     {"scale", {}},
                                              {"norm", {640}},           {"large", {600, 1000}}};

/// Small ones that share a record, and one of several tiles: for many starts.
inline const std::vector<WholeTensor> kFewWholes{{"bias", {7}}, {"weight", {130, 256}}};

/// How ranks cut a tensor: runs of whole blocks, rows, the last dimension, not at all: each rank
/// has a copy; runs that end anywhere.
enum class Cut { kRuns, kRows, kColumns, kCopies, kUneven };

/// Returns the part of a rank; a place without a name if it has none.
inline WholePlace place_of(const WholeTensor& whole, Cut cut, int rank, int ranks) {
  const auto at = static_cast<std::uint64_t>(rank);
  const auto of = static_cast<std::uint64_t>(ranks);
  WholePlace place{.name = whole.name, .shape = whole.shape, .first = 0, .offsets = {}, .box = {}};
  if (cut == Cut::kCopies) return place;
  if (cut == Cut::kRuns || cut == Cut::kUneven || whole.shape.empty()) {
    const std::uint64_t block = cut == Cut::kUneven ? 3 : 256;
    const std::uint64_t slice = (whole.count() + of * block - 1) / (of * block) * block;
    place.first = std::min(whole.count(), at * slice);
    if (place.first == whole.count()) return {};
    return place;
  }
  const std::size_t d = cut == Cut::kRows ? 0 : whole.shape.size() - 1;
  const std::int64_t slice = (whole.shape[d] + ranks - 1) / ranks;
  place.offsets.assign(whole.shape.size(), 0);
  place.box = whole.shape;
  place.offsets[d] = rank * slice;
  place.box[d] = std::min(slice, whole.shape[d] - place.offsets[d]);
  if (place.box[d] <= 0) return {};
  return place;
}

inline std::uint64_t count_of(const WholeTensor& whole, Cut cut, int rank, int ranks) {
  const WholePlace place = place_of(whole, cut, rank, ranks);
  if (place.name.empty()) return 0;
  if (place.is_box()) return whole_box(place.box).count();
  if (cut == Cut::kCopies) return whole.count();
  const WholePlace next = rank + 1 < ranks ? place_of(whole, cut, rank + 1, ranks) : WholePlace{};
  return (next.name.empty() ? whole.count() : next.first) - place.first;
}

/// A rank's trainer: gradients are functions of an element's place in its whole tensor.
class PieceTrainer {
 public:
  PieceTrainer(const std::vector<WholeTensor>& wholes, const LentKind& kind, Cut cut, int rank,
               int ranks) {
    model_ = {.name = "embedded", .units = {}, .dtype = kind.dtype};
    for (std::size_t w = 0; w < wholes.size(); ++w) {
      const WholePlace place = place_of(wholes[w], cut, rank, ranks);
      if (place.name.empty()) continue;
      add(w, place, count_of(wholes[w], cut, rank, ranks), kind.dtype);
    }
  }
  const ModelSpec& model() const { return model_; }
  ModelSpec& model() { return model_; }
  std::vector<std::uint64_t> first_elements() const {
    std::vector<std::uint64_t> firsts;
    for (const UnitSpec& unit : model_.units)
      firsts.push_back(run_begin(piece_at(*unit.params[0].whole, unit.count())).value_or(0));
    return firsts;
  }
  std::vector<TypedSpan<std::byte>> lent() {
    std::vector<TypedSpan<std::byte>> all;
    for (Param& param : params_) all.push_back(param.values.span());
    return all;
  }
  /// How many of the first `steps` steps had a gradient of tensor `whole`.
  static std::uint64_t steps_of(std::size_t whole, std::uint64_t steps) {
    std::uint64_t made = 0;
    for (std::uint64_t step = 1; step <= steps; ++step) made += has_gradient(whole, step) ? 1 : 0;
    return made;
  }
  void step(LentEngine& engine) {
    engine.wait_all_updated();
    const std::uint64_t step = engine.generation() + 1;
    std::vector<GroupStep> groups;
    std::vector<TypedSpan<const std::byte>> gradients;
    for (Param& param : params_) {
      groups.push_back({.learning_rate = 0.01F * static_cast<float>(param.whole + 1),
                        .beta2 = 0.95F,
                        .eps = 1e-8F,
                        .weight_decay = 0.1F,
                        .steps = steps_of(param.whole, step - 1) + 1});
      for (std::size_t i = 0; i < param.places.size(); ++i) {
        const std::uint64_t at = param.places[i] * 7 + step * 3 + param.whole;
        param.gradient.set(i, static_cast<float>(at % 23) * 0.125F - 1.0F);
      }
      const bool given = has_gradient(param.whole, step);
      gradients.emplace_back(given ? TypedSpan<const std::byte>(param.gradient.span())
                                   : TypedSpan<const std::byte>{});
    }
    StepOptions options{.blob = {}};
    options.groups = groups;
    engine.step(gradients, options);
    engine.wait_all_updated();
  }

 private:
  struct Param {
    std::size_t whole;
    TypedArray values;
    TypedArray gradient;
    std::vector<std::uint64_t> places;  ///< of each element in the whole
  };
  static bool has_gradient(std::size_t whole, std::uint64_t step) {
    return whole != 2 || step % 2 == 1;
  }
  void add(std::size_t w, const WholePlace& place, std::uint64_t count, DType dtype) {
    Param param{.whole = w, .values = {dtype, count}, .gradient = {dtype, count}, .places = {}};
    const TensorPiece piece = piece_at(place, count);
    for (const TensorRun& run : whole_runs(piece, {.first = 0, .count = count, .at = 0}))
      for (std::uint64_t i = 0; i < run.count; ++i) param.places.push_back(run.first + i);
    for (std::size_t i = 0; i < count; ++i)
      param.values.set(i, static_cast<float>(param.places[i] % 1013) * 0.01F - 2.0F);
    params_.push_back(std::move(param));
    const std::vector<std::int64_t> shape =
        place.is_box() ? place.box : std::vector{static_cast<std::int64_t>(count)};
    model_.units.push_back({.name = place.name,
                            .params = {{.name = place.name,
                                        .shape = shape,
                                        .group = static_cast<std::uint32_t>(model_.units.size()),
                                        .whole = place}}});
  }

  ModelSpec model_;
  std::vector<Param> params_;
};

/// Ranks that cut all tensors in one way.
struct Division {
  int ranks;
  Cut cut;
};
using WholeState = std::map<std::string, std::vector<std::byte>>;

class PieceWorld {
 public:
  struct Rank {
    int number;
    PieceTrainer& trainer;
    LentEngine& engine;
  };
  explicit PieceWorld(const LentKind& kind, std::string directory,
                      std::vector<WholeTensor> wholes = kWholes)
      : kind_(kind), directory_(std::move(directory)), wholes_(std::move(wholes)) {}

  /// Every rank of `division` opens its engine and does `body`; what each threw.
  std::vector<std::exception_ptr> run(const Division& division, EngineConfig::Resume resume,
                                      const std::function<void(Rank rank)>& body) const {
    const auto runtimes = connected_runtimes(division.ranks, 1);
    for (const auto& runtime : runtimes)
      if (prepare) prepare(*runtime);
    std::barrier<> all_done(division.ranks);
    return run_ranks(division.ranks, [&](int rank) {
      PieceTrainer trainer(wholes_, kind_, division.cut, rank, division.ranks);
      const EngineConfig its = config(division, resume, rank, trainer);
      if (change) change(trainer.model());
      std::unique_ptr<LentEngine> engine;
      struct Together {
        std::barrier<>& all;
        ~Together() { all.arrive_and_wait(); }
      } const leaving{all_done};
      engine = LentEngine::open(trainer.model(), its, *runtimes[static_cast<std::size_t>(rank)],
                                trainer.lent());
      body({.number = rank, .trainer = trainer, .engine = *engine});
      engine->make_durable();
    });
  }
  /// Makes steps, and returns what the store has then.
  WholeState trained(const Division& division, EngineConfig::Resume resume, int steps) const {
    expect_none(run(division, resume, [&](const Rank& rank) {
      for (int step = 0; step < steps; ++step) rank.trainer.step(rank.engine);
    }));
    return state();
  }
  WholeState state() const {
    const auto runtime = Runtime::create({.threads = 1, .trace_path = ""});
    OpenStore store(*runtime, directory_);
    WholeState all;
    runtime->reactor.block_on([](StoredState& from, WholeState& to) -> Task<> {
      JoinedState whole(from, "a test");
      const std::vector<StateTensor>& tensors = whole.content().tensors;
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        std::vector<std::byte>& bytes = to[tensors[t].name];
        bytes.resize(tensors[t].size_bytes());
        const TensorRun run{.first = 0, .count = tensors[t].count(), .at = 0};
        co_await whole.read(t, std::span(&run, 1), bytes);
      }
    }(store.state(), all));
    return all;
  }

  std::uint64_t host_budget_bytes = 64 * kMiB;
  std::function<void(Runtime& runtime)> prepare;  ///< done to every rank's runtime
  std::function<void(ModelSpec& model)> change;   ///< made to every rank's model
  std::function<void(int rank)> before_seal;      ///< called before a generation may be durable

 private:
  EngineConfig config(const Division& division, EngineConfig::Resume resume, int rank,
                      const PieceTrainer& trainer) const {
    EngineConfig config = small_config(directory_);
    config.host_budget_bytes = host_budget_bytes;
    config.clip_norm = 0;
    config.resume = resume;
    config.run_identity = fmt::format("data=1 ranks={}", division.ranks);
    config.placement.optimizer = Tier::kNvme;
    config.optimizer.state.format = kind_.format;
    config.optimizer.state_rounding = config.optimizer.param_rounding = kind_.rounding;
    config.first_elements = trainer.first_elements();
    if (before_seal) config.before_seal = [this, rank](std::uint64_t) { before_seal(rank); };
    return config;
  }
  LentKind kind_;
  std::string directory_;
  std::vector<WholeTensor> wholes_;
};

}  // namespace ziggurat::testing
