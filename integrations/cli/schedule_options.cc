// SPDX-License-Identifier: Apache-2.0
// integrations/cli/schedule_options.cc: knows which parameters a schedule has, and what a parameter
// is if it is not given.
#include "integrations/cli/schedule_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

#include "integrations/cli/settings.h"

namespace ziggurat::cli {
namespace {

using In = SettingsIn<ScheduleParameters>;
using P = ScheduleParameters;
using Names = std::vector<std::string_view>;
using enum SettingKind;

constexpr IntegerRange kSteps{.min = 0, .max = 1'000'000'000};
constexpr IntegerRange kStepsFrom1{.min = 1, .max = 1'000'000'000};
constexpr NumberRange kRate{.min = 0, .max = 1000};
constexpr NumberRange kMomentum{.min = 0, .max = 1};
constexpr std::array<std::string_view, 2> kWarmupTypes{"log", "linear"};

/// A schedule's name, its parameters, and the function that makes it from them. `make` fills in the
/// parameters that were not given.
struct Kind {
  std::string_view name;
  Names parameters;
  Schedule (*make)(ScheduleParameters& given, std::uint64_t steps);
};

std::uint64_t total(ScheduleParameters& given, std::uint64_t steps) {
  if (!given.total_num_steps) given.total_num_steps = steps;
  return *given.total_num_steps;
}

WarmupLR warmup(ScheduleParameters& given, double max_lr) {
  if (!given.warmup_max_lr) given.warmup_max_lr = max_lr;
  return {.warmup_min_lr = given.warmup_min_lr,
          .warmup_max_lr = *given.warmup_max_lr,
          .warmup_num_steps = given.warmup_num_steps,
          .warmup_type = given.warmup_type};
}

Schedule make_constant(ScheduleParameters& given, std::uint64_t) {
  return ConstantSchedule{.lr = given.lr, .warmup = given.warmup};
}

Schedule make_cosine(ScheduleParameters& given, std::uint64_t steps) {
  return CosineSchedule{.lr = given.lr,
                        .min_lr = given.min_lr,
                        .warmup = given.warmup,
                        .total_num_steps = total(given, steps)};
}

Schedule make_warmup_lr(ScheduleParameters& given, std::uint64_t) {
  return warmup(given, given.lr);
}

Schedule make_warmup_decay_lr(ScheduleParameters& given, std::uint64_t steps) {
  return WarmupDecayLR{.warmup = warmup(given, WarmupLR{}.warmup_max_lr),
                       .total_num_steps = static_cast<double>(total(given, steps))};
}

Schedule make_warmup_cosine_lr(ScheduleParameters& given, std::uint64_t steps) {
  return WarmupCosineLR{.lr = given.lr,
                        .warmup_min_ratio = given.warmup_min_ratio,
                        .cos_min_ratio = given.cos_min_ratio,
                        .warmup_num_steps = given.warmup_num_steps,
                        .warmup_type = given.warmup_type,
                        .total_num_steps = static_cast<double>(total(given, steps))};
}

Schedule make_one_cycle(ScheduleParameters& given, std::uint64_t) {
  OneCycle& cycle = given.cycle;
  if (!given.cycle_min_lr)
    throw UsageError("--cycle-min-lr is missing: give OneCycle's lowest learning rate");
  if (!given.cycle_max_lr)
    throw UsageError("--cycle-max-lr is missing: give OneCycle's highest learning rate");
  cycle.cycle_min_lr = *given.cycle_min_lr;
  cycle.cycle_max_lr = *given.cycle_max_lr;
  if (!given.cycle_second_step_size) given.cycle_second_step_size = given.cycle_first_step_size;
  cycle.cycle_first_step_size = static_cast<double>(given.cycle_first_step_size);
  cycle.cycle_second_step_size = static_cast<double>(*given.cycle_second_step_size);
  cycle.decay_step_size = static_cast<double>(given.decay_step_size);
  if (!cycle.cycle_second_stair_count)
    cycle.cycle_second_stair_count = cycle.cycle_first_stair_count;
  return cycle;
}

Schedule make_range_test(ScheduleParameters& given, std::uint64_t) { return given.range_test; }

/// Returns all schedules in the order of ScheduleName.
const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all{
      {"constant", {"lr", "warmup"}, make_constant},
      {"cosine", {"lr", "min_lr", "total_num_steps", "warmup"}, make_cosine},
      {"WarmupLR",
       {"warmup_max_lr", "warmup_min_lr", "warmup_num_steps", "warmup_type"},
       make_warmup_lr},
      {"WarmupDecayLR",
       {"total_num_steps", "warmup_max_lr", "warmup_min_lr", "warmup_num_steps", "warmup_type"},
       make_warmup_decay_lr},
      {"WarmupCosineLR",
       {"cos_min_ratio", "lr", "total_num_steps", "warmup_min_ratio", "warmup_num_steps",
        "warmup_type"},
       make_warmup_cosine_lr},
      {"OneCycle",
       {"cycle_first_stair_count", "cycle_first_step_size", "cycle_max_lr", "cycle_max_mom",
        "cycle_min_lr", "cycle_min_mom", "cycle_momentum", "cycle_second_stair_count",
        "cycle_second_step_size", "decay_lr_rate", "decay_mom_rate", "decay_step_size"},
       make_one_cycle},
      {"LRRangeTest",
       {"lr_range_test_min_lr", "lr_range_test_staircase", "lr_range_test_step_rate",
        "lr_range_test_step_size"},
       make_range_test}};
  return all;
}

std::span<const std::string_view> schedule_names() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> all;
    for (const Kind& kind : kinds()) all.push_back(kind.name);
    return all;
  }();
  return names;
}

/// Refuses a parameter that the schedule does not have, because it would be ignored silently.
void refuse_others(const Settings& settings, const Kind& kind, const Names& parameters) {
  for (const Setting& setting : schedule_settings()) {
    if (setting.name == "schedule" || !settings.given(setting.name)) continue;
    if (std::ranges::find(parameters, setting.name) != parameters.end()) continue;
    std::vector<std::string> keys;
    for (const std::string_view name : parameters) keys.push_back(dashed(name));
    throw UsageError(fmt::format("{}: the schedule {} has no such parameter; its parameters are {}",
                                 settings.described(setting.name), kind.name,
                                 fmt::join(keys, ", ")));
  }
}

}  // namespace

std::span<const SettingOf<ScheduleParameters>> schedule_settings() {
  static const std::vector<SettingOf<ScheduleParameters>> table{
      In::word("schedule", &P::schedule, schedule_names(),
               {.values = "NAME",
                .help = "how the learning rate changes over the steps: constant or cosine (after "
                        "--warmup), or DeepSpeed's WarmupLR, WarmupDecayLR, WarmupCosineLR, "
                        "OneCycle, LRRangeTest; `ziggurat schedule` shows the rates"}),
      In::number("lr", &P::lr, kRate,
                 {.values = "RATE",
                  .help = "learning rate after the warm-up of constant and cosine; WarmupCosineLR "
                          "multiplies it by its ratios"}),
      In::integer("warmup", &P::warmup, kSteps,
                  {.values = "N", .help = "constant, cosine: number of warm-up steps"}),
      In::number("min_lr", &P::min_lr, kRate,
                 {.values = "RATE", .help = "cosine: the rate at the end"}),
      In::integer("total_num_steps", &P::total_num_steps, kStepsFrom1,
                  {.values = "N",
                   .help = "cosine, WarmupDecayLR, WarmupCosineLR: the step at which the schedule "
                           "ends (default: --steps)"}),
      In::number("warmup_min_lr", &P::warmup_min_lr, kRate,
                 {.values = "RATE", .help = "WarmupLR, WarmupDecayLR: rate of the first steps"}),
      In::number("warmup_max_lr", &P::warmup_max_lr, kRate,
                 {.values = "RATE",
                  .help = "WarmupLR (default: --lr), WarmupDecayLR (default: 0.001): rate after "
                          "the warm-up"}),
      In::integer("warmup_num_steps", &P::warmup_num_steps, kStepsFrom1,
                  {.values = "N", .help = "Warmup..LR: number of warm-up steps"}),
      In::word("warmup_type", &P::warmup_type, kWarmupTypes,
               {.values = "log|linear", .help = "Warmup..LR: shape of the warm-up"}),
      In::number("warmup_min_ratio", &P::warmup_min_ratio, kRate,
                 {.values = "X", .help = "WarmupCosineLR: first rate, as a share of --lr"}),
      In::number("cos_min_ratio", &P::cos_min_ratio, kRate,
                 {.values = "X", .help = "WarmupCosineLR: last rate, as a share of --lr"}),
      In::number("cycle_min_lr", &P::cycle_min_lr, kRate,
                 {.values = "RATE", .help = "OneCycle: lowest rate (required)"}),
      In::number("cycle_max_lr", &P::cycle_max_lr, kRate,
                 {.values = "RATE", .help = "OneCycle: highest rate (required)"}),
      In::number("decay_lr_rate", [](auto& p) -> auto& { return p.cycle.decay_lr_rate; }, kRate,
                 {.values = "X", .help = "OneCycle: decay of the rate after the cycle"}),
      In::integer("cycle_first_step_size", &P::cycle_first_step_size, kStepsFrom1,
                  {.values = "N", .help = "OneCycle: steps up"}),
      In::integer("cycle_second_step_size", &P::cycle_second_step_size, kSteps,
                  {.values = "N", .help = "OneCycle: steps down (default: as many as up)"}),
      In::integer("cycle_first_stair_count",
                  [](auto& p) -> auto& { return p.cycle.cycle_first_stair_count; }, kSteps,
                  {.values = "N", .help = "OneCycle: stairs up; 0 means no stairs"}),
      In::integer("cycle_second_stair_count",
                  [](auto& p) -> auto& { return p.cycle.cycle_second_stair_count; }, kSteps,
                  {.values = "N", .help = "OneCycle: stairs down (default: as many as up)"}),
      In::integer(
          "decay_step_size", &P::decay_step_size, kSteps,
          {.values = "N", .help = "OneCycle: steps from one decay to the next; 0 means no decay"}),
      In::truth("cycle_momentum", kTruth, [](auto& p) -> auto& { return p.cycle.cycle_momentum; },
                {.values = "true|false",
                 .help = "OneCycle: move beta1 against the rate, with beta2 0.99"}),
      In::number("cycle_min_mom", [](auto& p) -> auto& { return p.cycle.cycle_min_mom; }, kMomentum,
                 {.values = "X", .help = "OneCycle: beta1 at the peak"}),
      In::number("cycle_max_mom", [](auto& p) -> auto& { return p.cycle.cycle_max_mom; }, kMomentum,
                 {.values = "X", .help = "OneCycle: beta1 at the ends"}),
      In::number("decay_mom_rate", [](auto& p) -> auto& { return p.cycle.decay_mom_rate; }, kRate,
                 {.values = "X", .help = "OneCycle: growth of beta1 after the cycle"}),
      In::number("lr_range_test_min_lr",
                 [](auto& p) -> auto& { return p.range_test.lr_range_test_min_lr; }, kRate,
                 {.values = "RATE", .help = "LRRangeTest: rate of the first step"}),
      In::integer("lr_range_test_step_size",
                  [](auto& p) -> auto& { return p.range_test.lr_range_test_step_size; },
                  kStepsFrom1, {.values = "N", .help = "LRRangeTest: steps of an interval"}),
      In::number("lr_range_test_step_rate",
                 [](auto& p) -> auto& { return p.range_test.lr_range_test_step_rate; }, kRate,
                 {.values = "X", .help = "LRRangeTest: growth in an interval"}),
      In::truth("lr_range_test_staircase", kSwitch,
                [](auto& p) -> auto& { return p.range_test.lr_range_test_staircase; },
                {.help = "LRRangeTest: grow only at the ends of intervals"}),
  };
  return table;
}

void make_schedule(ScheduleOptions& options, const Settings& settings, std::uint64_t steps) {
  const Kind& kind = kinds()[static_cast<std::size_t>(options.given.schedule)];
  options.name = kind.name;
  Names parameters = kind.parameters;
  // WarmupLR ends at the optimizer's rate unless it has a rate of its own.
  if (options.given.schedule == ScheduleName::kWarmupLR && !options.given.warmup_max_lr)
    parameters[0] = "lr";
  refuse_others(settings, kind, parameters);
  options.schedule = kind.make(options.given, steps);
  for (const SettingOf<ScheduleParameters>& setting : schedule_settings()) {
    if (std::ranges::find(parameters, setting.name) != parameters.end())
      options.parameters[dashed(setting.name)] = setting.text(options.given);
  }
  try {
    validate(options.schedule);
  } catch (const Error& error) {
    throw UsageError(fmt::format("--schedule {}: {}", options.name, error.what()));
  }
  // OneCycle's decay lets beta1 grow without end, so it is largest at the last step.
  const std::optional<Betas> last = scheduled(options.schedule, steps - 1).betas;
  if (last && last->beta1 >= 1) {
    throw UsageError(fmt::format(
        "{}: beta1 would be {:g} at step {}, but it must stay below 1; give a smaller rate",
        settings.described("decay_mom_rate"), last->beta1, steps));
  }
}

}  // namespace ziggurat::cli
