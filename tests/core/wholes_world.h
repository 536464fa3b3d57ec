// SPDX-License-Identifier: Apache-2.0
// tests/core/wholes_world.h: ranks in one process whose engines keep slices of a model and bring
// whole units of it, and what the model is in plain arrays.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "collectives/quantize/quantize.h"
#include "tests/core/lent_world.h"
#include "tiers/device/host_device.h"

namespace ziggurat::testing {

struct Whole {
  const char* name;
  std::uint64_t count;
  DType dtype;
  StreamedUnit unit;
  bool trained = true;
  bool optional = false;
  bool of_rank_0 = false;  ///< alone; all ranks have slices of the others
};

/// Small parameters that share records, some of a type and some of another; one that is large;
/// one of which a third rank has nothing; units that are frozen, or half of them; and an expert.
inline const std::vector<Whole> kWholes{
    {.name = "scale", .count = 1, .dtype = DType::kFloat32, .unit = 0, .of_rank_0 = true},
    {.name = "bias", .count = 105, .dtype = DType::kBFloat16, .unit = 0},
    {.name = "norm", .count = 999, .dtype = DType::kFloat32, .unit = 0},
    {.name = "weight", .count = 70'001, .dtype = DType::kBFloat16, .unit = 0},
    {.name = "large", .count = 200'003, .dtype = DType::kFloat32, .unit = 1},
    {.name = "few", .count = 2, .dtype = DType::kBFloat16, .unit = 1},
    {.name = "frozen.bias", .count = 300, .dtype = DType::kFloat32, .unit = 2, .trained = false},
    {.name = "frozen", .count = 40'000, .dtype = DType::kBFloat16, .unit = 2, .trained = false},
    {.name = "half", .count = 500, .dtype = DType::kBFloat16, .unit = 3},
    {.name = "base", .count = 50'000, .dtype = DType::kBFloat16, .unit = 3, .trained = false},
    {.name = "expert", .count = 20'000, .dtype = DType::kFloat32, .unit = 4, .optional = true},
    {.name = "expert.bias", .count = 50, .dtype = DType::kBFloat16, .unit = 4, .optional = true}};
inline constexpr StreamedUnit kWholeUnits = 5;
/// Memory of the device: for all units, and for the largest and one more.
inline constexpr std::uint64_t kRoomy = 4 * kMiB;
inline constexpr std::uint64_t kTight = kMiB;

/// The elements of a whole that a rank has.
struct Cut {
  std::uint64_t first = 0;
  std::uint64_t count = 0;
};
inline Cut cut_of(const Whole& whole, int rank, int ranks) {
  const std::uint64_t parts = whole.of_rank_0 ? 1 : static_cast<std::uint64_t>(ranks);
  const std::uint64_t each = (whole.count + parts - 1) / parts;
  const std::uint64_t first = std::min(whole.count, each * static_cast<std::uint64_t>(rank));
  return {.first = first, .count = std::min(each, whole.count - first)};
}

inline TypedArray slice(const TypedArray& values, Cut cut) {
  TypedArray part(values.dtype, cut.count);
  const std::size_t width = size_bytes(values.dtype);
  std::memcpy(part.bytes.data(), values.bytes.data() + cut.first * width, part.bytes.size());
  return part;
}

/// What whole parameters are, in plain arrays, step by step.
class PlainWholes {
 public:
  PlainWholes() : steps_(kWholes.size()) {
    const OptimizerConfig config;
    rounding_ = rounding_of_store(config, rounding_of_new_store(config));
    for (std::size_t w = 0; w < kWholes.size(); ++w) plain_.emplace_back(initial(w));
  }
  static TypedArray initial(std::size_t w) {
    TypedArray values(kWholes[w].dtype, kWholes[w].count);
    for (std::size_t i = 0; i < values.count(); ++i)
      values.set(i, initial_value(static_cast<UnitId>(w), i));
    return values;
  }
  static TypedArray gradient(std::size_t w, std::uint64_t generation) {
    TypedArray values(DType::kFloat32, kWholes[w].count);
    for (std::size_t i = 0; i < values.count(); ++i) {
      const auto unit = static_cast<UnitId>(w);
      values.set(i, gradient_of(initial_value(unit, i), unit, i, generation));
    }
    return values;
  }
  /// Whether the parameter has a gradient in the step that makes `generation`. Experts have none
  /// in some.
  static bool takes_part(std::size_t w, std::uint64_t generation) {
    return kWholes[w].trained && !(kWholes[w].optional && generation % 3 == 1);
  }

  GroupStep group(std::size_t w) const {
    return {.learning_rate = 0.01F * static_cast<float>(w + 1),
            .beta2 = 0.95F,
            .eps = 1e-8F,
            .weight_decay = w % 2 == 0 ? 0.1F : 0.0F,
            .steps = steps_[w] + 1,
            .params_written = written_.contains(w)};
  }
  void write(std::size_t w, const TypedArray& values) {
    plain_[w].write(values);
    written_.insert(w);
  }
  void step(std::uint64_t generation) {
    for (std::size_t w = 0; w < kWholes.size(); ++w) {
      if (!takes_part(w, generation)) continue;
      const GroupStep its = group(w);
      OptimizerStep::Settings settings = with_group({}, its);
      settings.rounding = rounding_;
      settings.grad_scale = its.grad_scale;
      settings.t = its.steps;
      settings.seed = kRoundingSeed;
      settings.rounding_step = generation;
      plain_[w].step(settings, gradient(w, generation));
      ++steps_[w];
    }
    written_.clear();
  }
  TypedArray values(std::size_t w) const { return plain_[w].values(); }

 private:
  std::vector<PlainParam> plain_;
  std::vector<std::uint64_t> steps_;
  std::set<std::size_t> written_;
  Roundings rounding_;
};

/// One rank's engine, its device, and what it must find.
class WholesRank {
 public:
  /// Has slice number `part` of `parts` of each whole.
  WholesRank(int rank, int part, int parts) : number(rank), parts_(parts) {
    for (const bool trained : {true, false}) {
      for (std::size_t w = 0; w < kWholes.size(); ++w)
        if (kWholes[w].trained == trained && cut_of(kWholes[w], part, parts).count > 0)
          own.push_back(w);
    }
    for (std::size_t w = 0; w < kWholes.size(); ++w)
      cuts.push_back(cut_of(kWholes[w], part, parts));
  }

  ModelSpec model() const {
    ModelSpec model{.name = "wholes", .units = {}, .dtype = DType::kBFloat16};
    for (ParamId p = 0; p < own.size(); ++p) {
      const Whole& its = kWholes[own[p]];
      ParamSpec param{.name = its.name,
                      .shape = {static_cast<std::int64_t>(cuts[own[p]].count)},
                      .group = its.trained ? p : 0,
                      .frozen = !its.trained,
                      .streamed = its.unit};
      UnitSpec unit{.name = its.name, .params = {}, .dtype = its.dtype, .optional = its.optional};
      unit.params.push_back(std::move(param));
      model.units.push_back(std::move(unit));
    }
    return model;
  }
  std::vector<WholeParam> wholes() const {
    std::vector<WholeParam> all;
    for (std::size_t w = 0; w < kWholes.size(); ++w) {
      const Whole& its = kWholes[w];
      all.push_back({.name = its.name,
                     .count = its.count,
                     .dtype = its.dtype,
                     .unit = its.unit,
                     .own = own_of(w),
                     .first = cuts[w].first,
                     .trained = its.trained,
                     .optional = its.optional,
                     .quantized = is_quantized(w)});
    }
    return all;
  }
  /// If parameters are quantized, those of unit 4 are not, nor is one of unit 1.
  bool is_quantized(std::size_t w) const {
    return quantized && kWholes[w].unit != 4 && std::string_view(kWholes[w].name) != "few";
  }
  /// What a whole is for a use: each rank's slice of a quantized one is rounded for itself.
  TypedArray used(std::size_t w) const {
    TypedArray values = plain.values(w);
    if (!is_quantized(w) || parts_ == 1) return values;
    for (int part = 0; part < parts_; ++part) {
      const Cut cut = cut_of(kWholes[w], part, parts_);
      const TypedSpan<std::byte> its = values.span().subspan(cut.first, cut.count);
      std::vector<std::byte> codes(quantized_bytes(QuantizedBits::k8, cut.count));
      quantize(QuantizedBits::k8, its, codes);
      dequantize(QuantizedBits::k8, codes, its);
    }
    return values;
  }
  /// This rank's slice of a whole, if it has one.
  std::optional<ParamId> own_of(std::size_t w) const {
    const auto found = std::ranges::find(own, w);
    if (found == own.end()) return std::nullopt;
    return static_cast<ParamId>(found - own.begin());
  }
  ParamId whole(std::size_t w) const { return static_cast<ParamId>(own.size() + w); }

  void open(const EngineConfig& config, const ModelSpec& model, Runtime& its,
            std::uint64_t device_bytes) {
    runtime = &its;
    device = make_device ? make_device(its.reactor, device_bytes)
                         : HostDevice::create(its.reactor, device_bytes);
    std::vector<TypedArray> given;
    std::vector<TypedSpan<std::byte>> lent;
    for (const std::size_t w : own) given.push_back(slice(PlainWholes::initial(w), cuts[w]));
    for (TypedArray& values : given) lent.push_back(values.span());
    engine = LentEngine::open(model, config, its, lent, device.get());
  }
  void close() {
    engine.reset();
    device.reset();
  }

  std::span<std::byte> place(ParamId param) const {
    const DeviceSpan<std::byte> bytes = engine->place(param).bytes;
    auto* const address = reinterpret_cast<std::byte*>(bytes.address());
    return {reach ? reach(address, bytes.size()) : address, bytes.size()};
  }
  /// Whether all parameters of a unit that is acquired are what they must be, and this rank's
  /// slices lie in them.
  ::testing::AssertionResult is_right(StreamedUnit unit, bool aside = false) const {
    for (std::size_t w = 0; w < kWholes.size(); ++w) {
      if (kWholes[w].unit != unit) continue;
      const std::span<const std::byte> found = place(whole(w));
      const TypedArray expected = aside ? plain.values(w) : used(w);
      if (!std::ranges::equal(found, expected.bytes))
        return ::testing::AssertionFailure()
               << "rank " << number << ", generation " << engine->generation() << ", '"
               << kWholes[w].name << "': byte "
               << std::ranges::mismatch(found, expected.bytes).in1 - found.begin() << " of "
               << found.size();
      const std::optional<ParamId> its = own_of(w);
      if (!its) continue;
      const std::byte* const at = found.data() + cuts[w].first * size_bytes(kWholes[w].dtype);
      if (place(*its).data() != at || engine->place(*its).count() != cuts[w].count)
        return ::testing::AssertionFailure() << "the slice of '" << kWholes[w].name << "'";
    }
    return ::testing::AssertionSuccess();
  }
  /// Acquires a unit, looks at it, and releases it.
  void look(StreamedUnit unit, bool aside = false) {
    if (aside) {
      engine->acquire_aside(unit, host);
    } else {
      engine->acquire(unit, host);
    }
    EXPECT_TRUE(is_right(unit, aside));
    engine->release(unit, host);
  }
  void look_at_all() {
    for (StreamedUnit u = 0; u < kWholeUnits; ++u) look(u);
  }
  /// Writes a whole parameter in the place where it is, and stores it.
  void write(std::size_t w, const TypedArray& values) {
    engine->acquire_aside(kWholes[w].unit, host);
    std::ranges::copy(values.bytes, place(whole(w)).begin());
    engine->store_param(whole(w), host);
    engine->release(kWholes[w].unit, host);
    plain.write(w, values);
  }
  void step() {
    const std::uint64_t generation = engine->generation() + 1;
    engine->wait_all_updated();  // gradients of the step before are given back
    gradients_.assign(own.size(), {});
    std::vector<TypedSpan<const std::byte>> lent(own.size());
    std::vector<GroupStep> groups;
    for (std::size_t p = 0; p < own.size(); ++p) {
      const std::size_t w = own[p];
      if (kWholes[w].trained) groups.push_back(plain.group(w));
      if (!PlainWholes::takes_part(w, generation)) continue;
      gradients_[p] = slice(PlainWholes::gradient(w, generation), cuts[w]);
      lent[p] = std::as_const(gradients_[p]).span();
    }
    StepOptions options{.blob = {}};
    options.groups = groups;
    engine->step(lent, options);
    plain.step(generation);
  }

  int number;
  bool quantized = false;
  std::vector<std::size_t> own;  ///< by ParamId: the whole of which it is a slice
  std::vector<Cut> cuts;         ///< by whole
  PlainWholes plain;
  Host host;
  Runtime* runtime = nullptr;
  /// Makes a device that is not the host-emulated one, and finds its memory for the CPU.
  std::function<std::unique_ptr<Device>(Reactor&, std::uint64_t size_bytes)> make_device;
  std::function<std::byte*(std::byte* address, std::size_t size_bytes)> reach;

 private:
  int parts_;
  std::vector<TypedArray> gradients_;

 public:
  std::unique_ptr<Device> device;
  std::unique_ptr<LentEngine> engine;
};

/// All ranks.
class WholesWorld {
 public:
  /// Every `parts` ranks have all slices; 0: all ranks together.
  WholesWorld(int size, Tier params, std::uint64_t device_bytes = kRoomy, int parts = 0)
      : group(parts == 0 ? size : parts), device_bytes_(device_bytes), params_(params) {
    for (int rank = 0; rank < size; ++rank)
      ranks.push_back(std::make_unique<WholesRank>(rank, rank % group, group));
  }
  int size() const { return static_cast<int>(ranks.size()); }
  EngineConfig config(int rank) const {
    const Where where = params_ == Tier::kNvme ? Where::kNvme : Where::kMemory;
    EngineConfig config = config_of(where, fmt::format("{}/rank{}", directory_.path(), rank));
    config.placement.params = params_;
    config.wholes = ranks[static_cast<std::size_t>(rank)]->wholes();
    if (host_budget_bytes != 0) config.host_budget_bytes = host_budget_bytes;
    return config;
  }
  /// Lets parameters come in int8.
  void quantize_params() {
    for (const std::unique_ptr<WholesRank>& rank : ranks) rank->quantized = true;
  }
  void connect(std::size_t threads = 2) { runtimes = connected_runtimes(size(), threads, timeout); }
  void open(int rank) {
    const auto index = static_cast<std::size_t>(rank);
    EngineConfig its = config(rank);
    ModelSpec model = ranks[index]->model();
    if (change) change(rank, its, model);
    ranks[index]->open(its, model, *runtimes[index], device_bytes_);
  }
  /// Every rank opens its engine, does `body` and closes it, all together; what each threw.
  std::vector<std::exception_ptr> run(const std::function<void(WholesRank& rank)>& body) {
    if (runtimes.empty()) connect();
    std::barrier<> all_done(size());
    return run_ranks(size(), [&](int rank) {
      WholesRank& its = *ranks[static_cast<std::size_t>(rank)];
      struct Together {
        std::barrier<>& all;
        WholesRank& its;
        ~Together() {
          all.arrive_and_wait();
          its.close();
        }
      } const leaving{all_done, its};
      open(rank);
      body(its);
    });
  }

  int group;                            ///< consecutive ranks that have all slices
  std::uint64_t host_budget_bytes = 0;  ///< of each engine; 0: config_of()'s
  /// Changes what a rank opens its engine with.
  std::function<void(int rank, EngineConfig& config, ModelSpec& model)> change;
  Nanoseconds timeout = std::chrono::minutes(1);
  std::vector<std::unique_ptr<Runtime>> runtimes;
  std::vector<std::unique_ptr<WholesRank>> ranks;

 private:
  ScratchDirectory directory_;
  std::uint64_t device_bytes_;
  Tier params_;
};

}  // namespace ziggurat::testing
