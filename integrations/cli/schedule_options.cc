// SPDX-License-Identifier: Apache-2.0
// integrations/cli/schedule_options.cc: which parameters a schedule has, and where a parameter that
// is not given comes from.
#include "integrations/cli/schedule_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

namespace ziggurat::cli {

std::span<const Setting> schedule_settings() {
  using enum SettingKind;
  static const std::vector<Setting> table{
      {"schedule", kText, "constant", "NAME",
       "learning rate over the steps: constant or cosine (after --warmup), or DeepSpeed's "
       "WarmupLR, "
       "WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest; `ziggurat schedule` shows it"},
      {"lr", kNumber, "6e-4", "RATE",
       "learning rate: where constant and cosine warm up to, what WarmupCosineLR's ratios are of"},
      {"warmup", kInteger, "10", "N", "constant, cosine: steps of warm-up"},
      {"min-lr", kNumber, "0", "RATE", "cosine: where it ends"},
      {"total-num-steps", kInteger, "", "N",
       "cosine, WarmupDecayLR, WarmupCosineLR: the step they end at (default: --steps)"},
      {"warmup-min-lr", kNumber, "0", "RATE", "WarmupLR, WarmupDecayLR: rate of the first steps"},
      {"warmup-max-lr", kNumber, "", "RATE",
       "WarmupLR (default: --lr), WarmupDecayLR (default: 0.001): rate after the warm-up"},
      {"warmup-num-steps", kInteger, "1000", "N", "Warmup..LR: steps of warm-up"},
      {"warmup-type", kText, "log", "log|linear", "Warmup..LR: its shape"},
      {"warmup-min-ratio", kNumber, "0", "X", "WarmupCosineLR: where it starts, of --lr"},
      {"cos-min-ratio", kNumber, "0.0001", "X", "WarmupCosineLR: where it ends, of --lr"},
      {"cycle-min-lr", kNumber, "", "RATE", "OneCycle: lower bound (needed)"},
      {"cycle-max-lr", kNumber, "", "RATE", "OneCycle: upper bound (needed)"},
      {"decay-lr-rate", kNumber, "0", "X", "OneCycle: decay of the rate after the cycle"},
      {"cycle-first-step-size", kInteger, "2000", "N", "OneCycle: steps up"},
      {"cycle-second-step-size", kInteger, "", "N", "OneCycle: steps down (default: as many)"},
      {"cycle-first-stair-count", kInteger, "0", "N", "OneCycle: stairs up; 0: none"},
      {"cycle-second-stair-count", kInteger, "", "N", "OneCycle: stairs down (default: as many)"},
      {"decay-step-size", kInteger, "0", "N", "OneCycle: steps of a decay interval; 0: no decay"},
      {"cycle-momentum", kTruth, "true", "true|false",
       "OneCycle: move beta1 against the rate, with beta2 0.99"},
      {"cycle-min-mom", kNumber, "0.8", "X", "OneCycle: beta1 at the peak"},
      {"cycle-max-mom", kNumber, "0.9", "X", "OneCycle: beta1 at the ends"},
      {"decay-mom-rate", kNumber, "0", "X", "OneCycle: growth of beta1 after the cycle"},
      {"lr-range-test-min-lr", kNumber, "0.001", "RATE", "LRRangeTest: rate of the first step"},
      {"lr-range-test-step-size", kInteger, "2000", "N", "LRRangeTest: steps of an interval"},
      {"lr-range-test-step-rate", kNumber, "1", "X", "LRRangeTest: growth in an interval"},
      {"lr-range-test-staircase", kSwitch, "false", "",
       "LRRangeTest: grow at intervals' ends only"},
  };
  return table;
}

namespace {

constexpr std::int64_t kStepsMax = 1'000'000'000;
constexpr double kRateMax = 1000;

/// Reads parameters and remembers which, as text.
class Reader {
 public:
  Reader(const Settings& settings, std::uint64_t steps) : settings_(settings), steps_(steps) {}

  bool has(const char* key) const { return !settings_.text(key).empty(); }
  double number(const char* key, double max = kRateMax) {
    return note(key, settings_.number(key, {.min = 0, .max = max}));
  }
  double number_or(const char* key, double fallback) {
    return has(key) ? number(key) : note(key, fallback);
  }
  double needed(const char* key, std::string_view what) {
    settings_.required(key, what);
    return number(key);
  }
  std::uint64_t count(const char* key, std::int64_t min = 0) {
    const auto value = settings_.integer(key, {.min = min, .max = kStepsMax});
    return note(key, static_cast<std::uint64_t>(value));
  }
  std::uint64_t count_or(const char* key, std::uint64_t fallback) {
    return has(key) ? count(key) : note(key, fallback);
  }
  std::uint64_t total() {
    return has("total-num-steps") ? count("total-num-steps", 1) : note("total-num-steps", steps_);
  }
  WarmupType warmup_type() {
    static constexpr std::array<std::string_view, 2> kTypes{"log", "linear"};
    const std::string word = note("warmup-type", settings_.choice("warmup-type", kTypes));
    return word == "linear" ? WarmupType::kLinear : WarmupType::kLog;
  }
  bool truth(const char* key) { return note(key, settings_.truth(key)); }

  std::map<std::string, std::string> noted;

 private:
  template <class Value>
  Value note(const char* key, Value value) {
    noted[key] = fmt::format("{}", value);
    return value;
  }
  const Settings& settings_;
  std::uint64_t steps_;
};

Schedule read_constant(Reader& reader) {
  return ConstantSchedule{.lr = reader.number("lr"), .warmup = reader.count("warmup")};
}

Schedule read_cosine(Reader& reader) {
  return CosineSchedule{.lr = reader.number("lr"),
                        .min_lr = reader.number("min-lr"),
                        .warmup = reader.count("warmup"),
                        .total_num_steps = reader.total()};
}

WarmupLR read_warmup(Reader& reader, double max_lr) {
  return {.warmup_min_lr = reader.number("warmup-min-lr"),
          .warmup_max_lr = max_lr,
          .warmup_num_steps = reader.count("warmup-num-steps", 1),
          .warmup_type = reader.warmup_type()};
}

Schedule read_warmup_lr(Reader& reader) {
  return read_warmup(reader, reader.number(reader.has("warmup-max-lr") ? "warmup-max-lr" : "lr"));
}

Schedule read_warmup_decay_lr(Reader& reader) {
  return WarmupDecayLR{
      .warmup = read_warmup(reader, reader.number_or("warmup-max-lr", WarmupLR{}.warmup_max_lr)),
      .total_num_steps = reader.total()};
}

Schedule read_warmup_cosine_lr(Reader& reader) {
  return WarmupCosineLR{.lr = reader.number("lr"),
                        .warmup_min_ratio = reader.number("warmup-min-ratio"),
                        .cos_min_ratio = reader.number("cos-min-ratio"),
                        .warmup_num_steps = reader.count("warmup-num-steps", 1),
                        .warmup_type = reader.warmup_type(),
                        .total_num_steps = reader.total()};
}

Schedule read_one_cycle(Reader& reader) {
  OneCycle cycle;
  cycle.cycle_min_lr = reader.needed("cycle-min-lr", "OneCycle's lowest learning rate");
  cycle.cycle_max_lr = reader.needed("cycle-max-lr", "OneCycle's highest learning rate");
  cycle.decay_lr_rate = reader.number("decay-lr-rate");
  cycle.cycle_first_step_size = reader.count("cycle-first-step-size", 1);
  cycle.cycle_second_step_size =
      reader.count_or("cycle-second-step-size", cycle.cycle_first_step_size);
  cycle.cycle_first_stair_count = reader.count("cycle-first-stair-count");
  cycle.cycle_second_stair_count =
      reader.count_or("cycle-second-stair-count", cycle.cycle_first_stair_count);
  cycle.decay_step_size = reader.count("decay-step-size");
  cycle.cycle_momentum = reader.truth("cycle-momentum");
  cycle.cycle_min_mom = reader.number("cycle-min-mom", 1);
  cycle.cycle_max_mom = reader.number("cycle-max-mom", 1);
  cycle.decay_mom_rate = reader.number("decay-mom-rate");
  return cycle;
}

Schedule read_lr_range_test(Reader& reader) {
  return LRRangeTest{.lr_range_test_min_lr = reader.number("lr-range-test-min-lr"),
                     .lr_range_test_step_size = reader.count("lr-range-test-step-size", 1),
                     .lr_range_test_step_rate = reader.number("lr-range-test-step-rate"),
                     .lr_range_test_staircase = reader.truth("lr-range-test-staircase")};
}

struct Kind {
  std::string_view name;
  Schedule (*read)(Reader&);
};
constexpr std::array kKinds{Kind{"constant", read_constant},
                            Kind{"cosine", read_cosine},
                            Kind{"WarmupLR", read_warmup_lr},
                            Kind{"WarmupDecayLR", read_warmup_decay_lr},
                            Kind{"WarmupCosineLR", read_warmup_cosine_lr},
                            Kind{"OneCycle", read_one_cycle},
                            Kind{"LRRangeTest", read_lr_range_test}};

/// What was given and not read would be ignored silently.
void refuse_others(const Settings& settings, const ScheduleOptions& options) {
  for (const Setting& setting : schedule_settings()) {
    if (setting.key == "schedule" || options.parameters.contains(setting.key)) continue;
    if (!settings.given(setting.key)) continue;
    std::vector<std::string> keys;
    for (const auto& [key, text] : options.parameters) keys.push_back(key);
    throw UsageError(fmt::format("{}: the schedule {} has no such parameter; it has {}",
                                 settings.described(setting.key), options.name,
                                 fmt::join(keys, ", ")));
  }
}

}  // namespace

ScheduleOptions read_schedule(const Settings& settings, std::uint64_t steps) {
  std::array<std::string_view, kKinds.size()> names;
  std::ranges::transform(kKinds, names.begin(), &Kind::name);
  ScheduleOptions options;
  options.name = settings.choice("schedule", names);
  Reader reader(settings, steps);
  options.schedule = std::ranges::find(kKinds, options.name, &Kind::name)->read(reader);
  options.parameters = std::move(reader.noted);
  refuse_others(settings, options);
  try {
    validate(options.schedule);
  } catch (const Error& error) {
    throw UsageError(fmt::format("--schedule {}: {}", options.name, error.what()));
  }
  // OneCycle's decay lets beta1 grow without end: the last step has the largest.
  const std::optional<Betas> last = scheduled(options.schedule, steps - 1).betas;
  if (last && last->beta1 >= 1) {
    throw UsageError(fmt::format("{}: beta1 would be {:g} at step {}: it must stay below 1",
                                 settings.described("decay-mom-rate"), last->beta1, steps));
  }
  return options;
}

}  // namespace ziggurat::cli
