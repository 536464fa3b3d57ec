// SPDX-License-Identifier: Apache-2.0
// integrations/c/schedule_calls.cc: the C functions of learning-rate schedules and the loss scale,
// for scripts that compute both by themselves. Nothing is kept from one call to the next.
#include <fmt/format.h>

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "integrations/c/c_call.h"
#include "integrations/c/engine_calls.h"
#include "integrations/c/wrong.h"
#include "integrations/c/ziggurat.h"
#include "optimizer/loss_scale.h"
#include "optimizer/schedule.h"

namespace {

using nlohmann::json;
using ziggurat::copied;
using ziggurat::give;
using ziggurat::guarded;
using ziggurat::LossScaler;
using ziggurat::LRRangeTest;
using ziggurat::OneCycle;
using ziggurat::required;
using ziggurat::Schedule;
using ziggurat::ScheduledStep;
using ziggurat::WarmupCosineLR;
using ziggurat::WarmupDecayLR;
using ziggurat::WarmupLR;
using ziggurat::WarmupType;
using ziggurat::wrong;

/// The keys of a JSON object. Errors: kInvalidArgument for one that is missing or of another type.
class Given {
 public:
  Given(const char* text, const char* what)
      : its_(json::parse(required(text, what), nullptr, /*allow_exceptions=*/false)), what_(what) {
    if (!its_.is_object()) throw wrong(fmt::format("{} must be a JSON object", what));
  }

  double number(const char* key) const {
    return value(key, &json::is_number, "a number").get<double>();
  }
  std::uint64_t whole(const char* key) const {
    return value(key, &json::is_number_unsigned, "a whole number").get<std::uint64_t>();
  }
  bool flag(const char* key) const {
    return value(key, &json::is_boolean, "true or false").get<bool>();
  }
  std::string text(const char* key) const {
    return value(key, &json::is_string, "a text").get<std::string>();
  }

 private:
  const json& value(const char* key, bool (json::*is_right)() const noexcept,
                    const char* kind) const {
    const auto found = its_.find(key);
    if (found != its_.end() && (*found.*is_right)()) return *found;
    throw wrong(fmt::format("{}: \"{}\" is {}, and must be {}", what_, key,
                            found == its_.end() ? "missing" : found->dump(), kind));
  }

  json its_;
  const char* what_;
};

WarmupType warmup_type_of(const Given& its) {
  const std::string name = its.text("warmup_type");
  if (name == "log") return WarmupType::kLog;
  if (name == "linear") return WarmupType::kLinear;
  throw wrong(fmt::format("schedule: \"warmup_type\" is \"{}\": give log or linear", name));
}

WarmupLR warmup_of(const Given& its) {
  return {.warmup_min_lr = its.number("warmup_min_lr"),
          .warmup_max_lr = its.number("warmup_max_lr"),
          .warmup_num_steps = its.whole("warmup_num_steps"),
          .warmup_type = warmup_type_of(its)};
}

OneCycle one_cycle_of(const Given& its) {
  return {.cycle_min_lr = its.number("cycle_min_lr"),
          .cycle_max_lr = its.number("cycle_max_lr"),
          .decay_lr_rate = its.number("decay_lr_rate"),
          .cycle_first_step_size = its.number("cycle_first_step_size"),
          .cycle_second_step_size = its.number("cycle_second_step_size"),
          .cycle_first_stair_count = its.whole("cycle_first_stair_count"),
          .cycle_second_stair_count = its.whole("cycle_second_stair_count"),
          .decay_step_size = its.number("decay_step_size"),
          .cycle_momentum = its.flag("cycle_momentum"),
          .cycle_min_mom = its.number("cycle_min_mom"),
          .cycle_max_mom = its.number("cycle_max_mom"),
          .decay_mom_rate = its.number("decay_mom_rate")};
}

/// Returns a schedule without judging its rates: scripts may let one fall below zero, as DeepSpeed
/// does.
Schedule schedule_of(const Given& its) {
  const std::string type = its.text("type");
  if (type == "WarmupLR") return warmup_of(its);
  if (type == "WarmupDecayLR")
    return WarmupDecayLR{.warmup = warmup_of(its),
                         .total_num_steps = its.number("total_num_steps")};
  if (type == "WarmupCosineLR")
    return WarmupCosineLR{.lr = its.number("lr"),
                          .warmup_min_ratio = its.number("warmup_min_ratio"),
                          .cos_min_ratio = its.number("cos_min_ratio"),
                          .warmup_num_steps = its.whole("warmup_num_steps"),
                          .warmup_type = warmup_type_of(its),
                          .total_num_steps = its.number("total_num_steps")};
  if (type == "OneCycle") return one_cycle_of(its);
  if (type == "LRRangeTest")
    return LRRangeTest{.lr_range_test_min_lr = its.number("lr_range_test_min_lr"),
                       .lr_range_test_step_size = its.whole("lr_range_test_step_size"),
                       .lr_range_test_step_rate = its.number("lr_range_test_step_rate"),
                       .lr_range_test_staircase = its.flag("lr_range_test_staircase")};
  throw wrong(
      fmt::format("schedule: \"type\" is \"{}\": give WarmupLR, WarmupDecayLR, "
                  "WarmupCosineLR, OneCycle or LRRangeTest",
                  type));
}

}  // namespace

ziggurat_status ziggurat_schedule(const char* schedule, uint64_t steps,
                                  ziggurat_scheduled_step* step) {
  return guarded([&] {
    ziggurat_scheduled_step own = copied(step, "step");
    const ScheduledStep its = ziggurat::scheduled(schedule_of({schedule, "schedule"}), steps);
    own.learning_rate = its.learning_rate;
    own.has_betas = its.betas ? 1 : 0;
    own.beta1 = its.betas ? its.betas->beta1 : 0;
    own.beta2 = its.betas ? its.betas->beta2 : 0;
    give(own, step);
  });
}

ziggurat_status ziggurat_update_loss_scale(const char* settings, int32_t overflow,
                                           ziggurat_loss_scale* scale) {
  return guarded([&] {
    ziggurat_loss_scale own = copied(scale, "scale");
    const Given its(settings, "settings");
    LossScaler scaler({.loss_scale_window = its.whole("loss_scale_window"),
                       .hysteresis = its.whole("hysteresis"),
                       .consecutive_hysteresis = its.flag("consecutive_hysteresis"),
                       .min_loss_scale = its.number("min_loss_scale"),
                       .max_loss_scale = std::numeric_limits<double>::max(),
                       .ends_at_minimum = its.flag("ends_at_minimum")},
                      {.scale = own.scale,
                       .hysteresis_left = own.hysteresis_left,
                       .steps_since_overflow = own.steps_since_overflow});
    scaler.update(overflow != 0);
    own.scale = scaler.state().scale;
    own.hysteresis_left = scaler.state().hysteresis_left;
    own.steps_since_overflow = scaler.state().steps_since_overflow;
    give(own, scale);
  });
}
