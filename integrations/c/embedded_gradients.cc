// SPDX-License-Identifier: Apache-2.0
// integrations/c/embedded_gradients.cc: gradients of the step to come: lent, summed in memory or on
// NVMe, and their norm.
#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>
#include <vector>

#include "base/numerics/typed_value.h"
#include "base/runtime/for_each.h"
#include "integrations/c/embedded_engine.h"
#include "integrations/c/wrong.h"
#include "optimizer/gradient.h"
#include "tiers/store/tile_size.h"

namespace ziggurat {
namespace {

/// Number of tiles whose squares one job adds.
constexpr std::size_t kNormTiles = 32;

/// Returns the sum of squares of one run of elements, added tile by tile.
double squares(TypedSpan<const std::byte> values) {
  std::vector<float> widened(kTileElements);
  double sum = 0;
  for (std::size_t begin = 0; begin < values.count(); begin += kTileElements) {
    const std::size_t count = std::min<std::size_t>(kTileElements, values.count() - begin);
    const std::span<float> tile = std::span(widened).first(count);
    for (std::size_t i = 0; i < count; ++i)
      tile[i] = value_at(values.dtype, values.bytes.data(), begin + i);
    sum += round_gradient(tile, as_typed(tile));
  }
  return sum;
}

}  // namespace

void EmbeddedEngine::lend_gradient(std::size_t param, TypedSpan<const std::byte> values,
                                   float scale) {
  in_turn([&](LentEngine&) {
    require_trained("lend_gradient", param);
    require_count("lend_gradient", param, values.count());
    replace_gradient({.param = param, .values = values, .scale = scale});
  });
}

void EmbeddedEngine::lend_gradients(std::span<const LentGradient> gradients) {
  in_turn([&](LentEngine&) {
    for (const LentGradient& its : gradients) {
      require_trained("lend_gradients", its.param);
      require_count("lend_gradients", its.param, its.values.count());
    }
    for (const LentGradient& its : gradients) replace_gradient(its);
  });
}

void EmbeddedEngine::replace_gradient(const LentGradient& its) {
  Gradient& gradient = gradients_[its.param];
  if (gradient.on_nvme) engine_->discard_sum(static_cast<ParamId>(its.param));
  gradient.on_nvme = false;
  gradient.values = its.values;
  gradient.scale = its.scale;
}

void EmbeddedEngine::add_gradient(std::size_t param, TypedSpan<const std::byte> values,
                                  float scale) {
  in_turn([&](LentEngine&) { sum_gradient(param, values, scale); });
}

void EmbeddedEngine::scale_gradient(std::size_t param, float scale) {
  in_turn([&](LentEngine&) {
    require_trained("scale_gradient", param);
    if (gradients_[param].present()) gradients_[param].scale = scale;
  });
}

/// The first summand is the sum: it is not added to zeros, which would lose the sign of a -0.
void EmbeddedEngine::sum_gradient(std::size_t param, TypedSpan<const std::byte> values,
                                  float scale) {
  require_trained("add_gradient", param);
  require_count("add_gradient", param, values.count());
  Gradient& gradient = gradients_[param];
  const bool is_sum = gradient.on_nvme || is_own(gradient);
  if (is_sum && gradient.scale != 1) {
    throw wrong(
        fmt::format("add_gradient(parameter {} '{}'): the sum was multiplied already: add all "
                    "gradients before ziggurat_scale_gradient()",
                    param, name_of(param)));
  }
  if (sums_on_nvme_) {
    const auto id = static_cast<ParamId>(param);
    const bool first = !gradient.present();
    const TypedSpan<const std::byte> lent = std::exchange(gradient.values, {});
    const float factor = std::exchange(gradient.scale, 1.0F);
    // Also if the rest fails: the caller may free what was lent, and the engine refuses the sum.
    gradient.on_nvme = true;
    if (!lent.bytes.empty()) engine_->add_gradient(id, lent, factor, /*instead_of_zeros=*/true);
    engine_->add_gradient(id, values, scale, /*instead_of_zeros=*/first);
    return;
  }
  if (is_own(gradient)) return accumulate_gradient(values, scale, gradient.sum);
  // Wait, because the previous step may still read the sum.
  engine_->wait_updated(static_cast<ParamId>(param));
  gradient.sum.resize(values.count());
  const bool first = !gradient.present();
  const TypedSpan<const std::byte> begin = first ? values : gradient.values;
  const float factor = first ? scale : gradient.scale;
  widen(begin, gradient.sum);
  if (factor != 1)
    for (float& sum : gradient.sum) sum *= factor;
  if (!first) accumulate_gradient(values, scale, gradient.sum);
  gradient.values = as_typed(std::span<const float>(gradient.sum));
  gradient.scale = 1;
}

/// Whether what the parameter has is a sum in this engine's memory.
bool EmbeddedEngine::is_own(const Gradient& gradient) {
  const std::span<const std::byte> sum = std::as_bytes(std::span(gradient.sum));
  return !gradient.values.bytes.empty() && gradient.values.bytes.data() == sum.data();
}

void EmbeddedEngine::discard_gradients() {
  const std::lock_guard lock(mutex_);
  for (std::size_t p = 0; p < gradients_.size() && !engine_->has_ended(); ++p)
    if (gradients_[p].on_nvme) engine_->discard_sum(static_cast<ParamId>(p));
  forget_gradients();
}

void EmbeddedEngine::discard_gradient(std::size_t param) {
  in_turn([&](LentEngine&) {
    require_trained("discard_gradient", param);
    replace_gradient({.param = param});
  });
}

void EmbeddedEngine::forget_gradients() {
  for (Gradient& gradient : gradients_) {
    gradient.values = {};
    gradient.scale = 1;
    gradient.on_nvme = false;
  }
}

double EmbeddedEngine::gradient_norm() {
  return in_turn([&](LentEngine&) { return norm_of_gradients(); });
}

double EmbeddedEngine::norm_of_gradients() {
  struct Run {
    std::size_t param;
    TypedSpan<const std::byte> values;
    double squared = 0;
  };
  std::vector<Run> runs;
  for (std::size_t p = 0; p < gradients_.size(); ++p) {
    const TypedSpan<const std::byte>& all = gradients_[p].values;
    for (std::size_t begin = 0; begin < all.count(); begin += kNormTiles * kTileElements) {
      const std::size_t count = std::min(kNormTiles * kTileElements, all.count() - begin);
      runs.push_back({.param = p, .values = all.subspan(begin, count)});
    }
  }
  const std::function<Task<>(std::size_t)> add = [&](std::size_t i) -> Task<> {
    const std::function<void()> job = [&run = runs[i]] { run.squared = squares(run.values); };
    const Work work{.name = "sum norm", .bytes = runs[i].values.bytes.size(), .decides = true};
    co_await runtime_.jobs().run(runtime_.reactor, work, job);
  };
  runtime_.reactor.block_on(
      for_each_index(runtime_.reactor, runs.size(), 2 * runtime_.workers->threads(), add));
  double squared = 0;
  auto run = runs.begin();
  for (std::size_t p = 0; p < gradients_.size(); ++p) {
    const auto scale = static_cast<double>(gradients_[p].scale);
    if (gradients_[p].on_nvme) squared = add_squares_on_nvme(p, squared);
    for (; run != runs.end() && run->param == p; ++run) squared += run->squared * scale * scale;
  }
  return std::sqrt(squared);
}

/// Adds the squares of a sum on NVMe to `squared`, run by run, as those of one in memory are.
double EmbeddedEngine::add_squares_on_nvme(std::size_t param, double squared) {
  const auto scale = static_cast<double>(gradients_[param].scale);
  std::vector<float> values(kNormTiles * kTileElements);
  const std::size_t count = count_of(param);
  for (std::size_t begin = 0; begin < count; begin += values.size()) {
    const std::span<float> part = std::span(values).first(std::min(values.size(), count - begin));
    engine_->read_sum(static_cast<ParamId>(param), begin, part);
    squared += squares(as_typed(std::span<const float>(part))) * scale * scale;
  }
  return squared;
}

bool EmbeddedEngine::read_gradient(std::size_t param, std::span<float> values) {
  return in_turn([&](LentEngine&) {
    require_count("read_gradient", param, values.size());
    const Gradient& its = gradients_[param];
    if (its.on_nvme) {
      engine_->read_sum(static_cast<ParamId>(param), 0, values);
      for (float& value : values) value *= its.scale;
    }
    if (its.on_nvme || its.values.bytes.empty()) return its.on_nvme;
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = its.scale * value_at(its.values.dtype, its.values.bytes.data(), i);
    return true;
  });
}

}  // namespace ziggurat
