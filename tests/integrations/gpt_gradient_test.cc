// SPDX-License-Identifier: Apache-2.0
// tests/integrations/gpt_gradient_test.cc: the trainer's gradients against finite differences of an
// independent model.
//
// The differences are taken on a double-precision model of the same parameters, so they are exact
// to 1e-8; differences of the trainer's own loss would drown in its bf16 activations. What is left
// is the trainer's rounding: half a bf16 step is 0.2 %, some twenty roundings deep, random in sign.
// Seen: 0.1 to 0.7 % of a tensor's norm over the elements drawn, at most 0.09 % in fp16 and 6e-7 in
// fp32; a wrong formula misses by tens of percent. (Weights much larger than these make attention
// sharp and its gradient a small difference of large numbers: then rounding alone reaches 9 %.)
#include <gmock/gmock.h>

#include <algorithm>

#include "optimizer/gradient.h"
#include "tests/integrations/gpt_fixture.h"
#include "tests/integrations/gpt_reference.h"
#include "tests/support/typed_values.h"

namespace ziggurat::gpt {
namespace {

/// What a type's rounding costs at most, and what its loss is scaled by.
struct Numbers {
  DType dtype;
  double tolerance;
  float loss_scale;
};
constexpr std::uint64_t kSeed = 11;

// Initial weights are too alike to test with: biases 0 and norms 1 hide mistakes. These are none of
// that.
void roughen(testing::RamEngine& engine) {
  for (UnitId unit = 0; unit < engine.unit_count(); ++unit) {
    const TypedSpan<std::byte> params = engine.params(unit);
    std::vector<float> values(params.count());
    fill_normal(mix64(kSeed + unit), 0, values);
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = testing::value_at(params, i) * 2 + 0.05F * values[i];
    round_params(values, params);
  }
}

class GptGradient : public ::testing::TestWithParam<Numbers> {
 protected:
  static void check(ModelConfig model, const RunShape& shape) {
    model.dtype = GetParam().dtype;
    Training training(model, shape, 2);
    roughen(training.engine);
    const std::vector<Batch> batches = training.batches(1);
    const double loss = training.trainer.forward_backward(batches, GetParam().loss_scale);

    ReferenceParams params;
    for (UnitId unit = 0; unit < training.engine.unit_count(); ++unit) {
      params.emplace_back();
      const TypedSpan<std::byte> rounded = training.engine.params(unit);
      for (std::size_t i = 0; i < rounded.count(); ++i)
        params.back().push_back(static_cast<double>(testing::value_at(rounded, i)));
    }
    const ReferenceModel reference(model);
    EXPECT_NEAR(loss, reference.loss(params, batches, shape.context), GetParam().tolerance);
    EXPECT_NEAR(training.trainer.evaluate(batches), loss, 1e-6);

    const ModelSpec spec = make_spec(model);
    for (UnitId unit = 0; unit < spec.units.size(); ++unit) {
      std::size_t first = 0;
      for (const ParamSpec& param : spec.units[unit].params) {
        check_tensor(reference, params, batches, shape, training.engine.finished_gradient(unit),
                     unit, first, param);
        first += param.count();
      }
    }
  }

  // Twelve elements: those with the largest gradients (unused rows of embeddings have none), from
  // three parts of the tensor.
  static std::vector<std::size_t> draw(std::span<const float> gradient) {
    std::vector<std::size_t> drawn;
    for (std::size_t part = 0; part < 3; ++part) {
      std::vector<std::size_t> indices;
      for (std::size_t i = part; i < gradient.size(); i += 3) indices.push_back(i);
      const auto larger = [&](std::size_t a, std::size_t b) {
        return std::abs(gradient[a]) > std::abs(gradient[b]);
      };
      const std::size_t some = std::min<std::size_t>(indices.size(), 4);
      std::partial_sort(indices.begin(), indices.begin() + static_cast<std::ptrdiff_t>(some),
                        indices.end(), larger);
      // Two of the largest, and two from anywhere.
      drawn.insert(drawn.end(), indices.begin(),
                   indices.begin() + static_cast<std::ptrdiff_t>(some / 2));
      drawn.push_back(indices[mix64(kSeed + part) % indices.size()]);
      drawn.push_back(indices[mix64(kSeed + 10 + part) % indices.size()]);
    }
    return drawn;
  }

  static void check_tensor(const ReferenceModel& reference, ReferenceParams& params,
                           std::span<const Batch> batches, const RunShape& shape,
                           std::span<const float> unit_gradient, UnitId unit, std::size_t first,
                           const ParamSpec& param) {
    const std::span<const float> gradient = unit_gradient.subspan(first, param.count());
    double error = 0;
    double norm = 0;
    for (const std::size_t i : draw(gradient)) {
      double& value = params[unit][first + i];
      const double before = value;
      constexpr double kStep = 1e-4;
      value = before + kStep;
      const double above = reference.loss(params, batches, shape.context);
      value = before - kStep;
      const double below = reference.loss(params, batches, shape.context);
      value = before;
      const double expected = (above - below) / (2 * kStep);
      const auto unscaled = static_cast<double>(gradient[i] / GetParam().loss_scale);
      const double difference = unscaled - expected;
      error += difference * difference;
      norm += expected * expected;
    }
    EXPECT_GT(norm, 0) << param.name;
    EXPECT_LT(std::sqrt(error), GetParam().tolerance * std::sqrt(norm))
        << param.name << ": error " << std::sqrt(error / norm);
  }
};

INSTANTIATE_TEST_SUITE_P(EveryType, GptGradient,
                         ::testing::Values(Numbers{DType::kBFloat16, 0.02, 1},
                                           Numbers{DType::kFloat16, 0.003, 512},
                                           Numbers{DType::kFloat32, 1e-5, 1}),
                         [](const auto& one) { return std::string(to_string(one.param.dtype)); });

TEST_P(GptGradient, OfEveryTensorAgreesWithFiniteDifferences) {
  check(parse_model("2x32x2"), {.batch = 2, .accumulate = 2, .context = 12});
}

TEST_P(GptGradient, OfHeadsThatFillNoVectorToo) {
  check(parse_model("1x48x4"), {.batch = 1, .accumulate = 1, .context = 9});
}

TEST_P(GptGradient, AcrossSeveralBlocksOfQueries) {
  check(parse_model("1x16x1"), {.batch = 1,
                                .accumulate = 1,
                                .context = 150,
                                .checkpointing = ActivationCheckpointing::kOff});
}

}  // namespace
}  // namespace ziggurat::gpt
