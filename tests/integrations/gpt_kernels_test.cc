// SPDX-License-Identifier: Apache-2.0
// tests/integrations/gpt_kernels_test.cc: the kernels against plain double arithmetic, and every
// SIMD target against the narrowest, bit for bit.
#include <gmock/gmock.h>

#include <cmath>
#include <map>
#include <string>

#include "integrations/gpt/kernels.h"
#include "integrations/gpt/random.h"

namespace ziggurat::gpt::kernels {
namespace {

constexpr std::int64_t kRows = 37;
constexpr std::int64_t kWidth = 112;  // not a multiple of 64: strips and their rest

std::vector<float> normal_floats(std::size_t count, std::uint64_t key, float scale = 1.0F) {
  std::vector<float> values(count);
  fill_normal(key, 0, values);
  for (float& value : values) value *= scale;
  return values;
}
std::vector<bf16> normal_bf16(std::size_t count, std::uint64_t key, float scale = 1.0F) {
  std::vector<bf16> result;
  for (const float value : normal_floats(count, key, scale)) result.push_back(float_to_bf16(value));
  return result;
}

constexpr auto kCount = static_cast<std::size_t>(kRows * kWidth);

// Every kernel once; its outputs as bytes, by its name.
class AllKernels {
 public:
  std::map<std::string, std::string> run() {
    epilogues();
    norms();
    attention();
    ends();
    return out_;
  }

 private:
  template <class T>
  void keep(const char* kernel, const std::vector<T>& values) {
    out_[kernel].append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  }

  void epilogues() {
    std::vector<float> tile = normal_floats(kCount, 1, 4.0F);
    tile[0] = 1e-40F;  // denormals stay
    tile[1] = -1e-40F;
    tile[2] = 200.0F;
    tile[3] = -200.0F;
    const auto bias = normal_bf16(kWidth, 2);
    const auto residual = normal_bf16(kCount, 3);
    const Tile t{tile.data(), kWidth, kRows, kWidth};
    std::vector<bf16> a(kCount);
    std::vector<bf16> b(kCount);
    const Rows rows_a{a.data(), kWidth};
    const Rows rows_b{b.data(), kWidth};
    store({tile.data(), kWidth, kRows, kWidth - 5}, rows_a);
    keep("store", a);
    store_bias(t, bias.data(), rows_a);
    keep("store_bias", a);
    store_bias_residual(t, bias.data(), {residual.data(), kWidth}, rows_a);
    keep("store_bias_residual", a);
    store_bias_gelu(t, bias.data(), rows_a, rows_b);
    keep("store_bias_gelu", a);
    keep("store_bias_gelu", b);
    store_gelu_backward(t, rows_a);
    keep("store_gelu_backward", a);
    std::vector<float> wide(kCount);
    widen(residual.data(), static_cast<std::int64_t>(kCount) - 3, wide.data());
    keep("widen", wide);
  }

  void norms() {
    const auto x = normal_bf16(kCount, 4, 3.0F);
    const auto dy = normal_bf16(kCount, 5);
    const auto weight = normal_bf16(kWidth, 6);
    const auto bias = normal_bf16(kWidth, 7);
    std::vector<bf16> y(kCount);
    std::vector<RowStats> stats(kRows);
    layernorm(x.data(), kRows, kWidth, {weight.data(), bias.data()}, y.data(), stats.data());
    keep("layernorm", y);
    keep("layernorm", stats);
    std::vector<bf16> gradient = normal_bf16(kCount, 8);
    layernorm_backward(dy.data(), x.data(), stats.data(), weight.data(), kRows, kWidth,
                       gradient.data(), gradient.data());
    keep("layernorm_backward", gradient);
    std::vector<float> d_weight(kWidth, 0.5F);
    std::vector<float> d_bias(kWidth, 0.25F);
    layernorm_backward_columns({dy.data(), kWidth}, {x.data(), kWidth}, stats.data(), kRows, kWidth,
                               d_weight.data(), d_bias.data());
    add_column_sums({dy.data(), kWidth}, kRows, kWidth, d_bias.data());
    keep("add_column_sums", d_weight);
    keep("add_column_sums", d_bias);
  }

  void attention() {
    const CausalRows shape{.rows = kRows, .first = 20, .leading = 64, .scale = 0.3F};
    const auto count = static_cast<std::size_t>(kRows * shape.leading);
    const auto scores = normal_floats(count, 9, 20.0F);
    const auto d_probabilities = normal_floats(count, 10);
    std::vector<float> work = scores;
    std::vector<bf16> p(count);
    std::vector<bf16> d_scores(count);
    std::vector<RowStats> stats(kRows);
    causal_softmax(shape, work.data(), p.data(), stats.data());
    keep("causal_softmax", p);
    keep("causal_softmax", stats);
    std::vector<float> dots(kRows);
    const auto a = normal_bf16(kCount, 11);
    const auto b = normal_bf16(kCount, 12);
    row_dots({a.data(), kWidth}, {b.data(), kWidth}, kRows, 41, dots.data());
    keep("row_dots", dots);
    causal_softmax_backward(shape, scores.data(), stats.data(), d_probabilities.data(), dots.data(),
                            p.data(), d_scores.data());
    keep("causal_softmax_backward", p);
    keep("causal_softmax_backward", d_scores);
  }

  void ends() {
    std::vector<std::uint8_t> tokens;
    for (std::int64_t i = 0; i < kRows; ++i) tokens.push_back(static_cast<std::uint8_t>(i * i % 7));
    const auto wte = normal_bf16(256 * kWidth, 13);
    const auto wpe = normal_bf16(16 * kWidth, 14);
    std::vector<bf16> x(kCount);
    embed(tokens.data(), kRows, kWidth, 16, 3, wte.data(), wpe.data(), x.data());
    keep("embed", x);
    std::vector<float> d_wte(256 * kWidth);
    std::vector<float> d_wpe(16 * kWidth);
    embed_backward_columns(tokens.data(), kRows, kWidth, 16, x.data(), kWidth, d_wte.data(),
                           d_wpe.data());
    keep("embed_backward_columns", d_wte);
    keep("embed_backward_columns", d_wpe);
    const auto logits = normal_floats(kRows * 256, 15, 5.0F);
    std::vector<float> losses(kRows);
    std::vector<bf16> d_logits(kRows * 256);
    cross_entropy(logits.data(), tokens.data(), kRows, 256, 0.01F, losses.data(), d_logits.data());
    keep("cross_entropy", losses);
    keep("cross_entropy", d_logits);
  }

  std::map<std::string, std::string> out_;
};

TEST(GptKernels, EveryTargetGivesTheSameBits) {
  const auto targets = simd_targets();
  ASSERT_GE(targets.size(), 2U) << "nothing to compare on this machine";
  force_simd_target(targets.back());
  const auto expected = AllKernels().run();
  for (const std::string_view target : targets) {
    force_simd_target(target);
    for (const auto& [kernel, bytes] : AllKernels().run()) {
      EXPECT_TRUE(bytes == expected.at(kernel))
          << kernel << ": " << target << " differs from " << targets.back();
    }
  }
  force_simd_target("");
}

TEST(GptKernels, RoundsAsTheEngineDoes) {
  std::vector<float> values;
  for (std::uint32_t bits = 0; bits < 0xffff0000U; bits += 0x7fff)
    values.push_back(std::bit_cast<float>(bits));
  values.push_back(std::nanf(""));
  values.push_back(-INFINITY);
  std::vector<bf16> rounded(values.size());
  const auto count = static_cast<std::int64_t>(values.size());
  store({values.data(), count, 1, count}, {rounded.data(), count});
  for (std::size_t i = 0; i < values.size(); ++i)
    ASSERT_EQ(rounded[i], float_to_bf16(values[i])) << values[i];
}

TEST(GptKernels, GeluAndItsDerivative) {
  std::vector<float> x;
  for (float v = -12.0F; v <= 12.0F; v += 0.0625F) x.push_back(bf16_to_float(float_to_bf16(v)));
  x.resize(x.size() / 16 * 16);
  const auto count = static_cast<std::int64_t>(x.size());
  const std::vector<bf16> zero(x.size());
  std::vector<bf16> before(x.size());
  std::vector<bf16> y(x.size());
  store_bias_gelu({x.data(), count, 1, count}, zero.data(), {before.data(), count},
                  {y.data(), count});
  const auto gelu = [](double v) {
    return 0.5 * v * (1 + std::tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)));
  };
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double expected = gelu(static_cast<double>(x[i]));
    EXPECT_NEAR(static_cast<double>(bf16_to_float(y[i])), expected, std::abs(expected) / 250 + 1e-6)
        << x[i];
  }
  const std::vector<float> ones(x.size(), 1.0F);
  store_gelu_backward({ones.data(), count, 1, count}, {before.data(), count});
  for (std::size_t i = 0; i < x.size(); ++i) {
    const auto v = static_cast<double>(x[i]);
    const double slope = (gelu(v + 1e-5) - gelu(v - 1e-5)) / 2e-5;
    EXPECT_NEAR(static_cast<double>(bf16_to_float(before[i])), slope, std::abs(slope) / 250 + 1e-5)
        << x[i];
  }
}

TEST(GptKernels, CrossEntropyOfARow) {
  const std::vector<float> logits = normal_floats(256, 21, 4.0F);
  double total = 0;
  for (const float l : logits) total += std::exp(static_cast<double>(l));
  const std::uint8_t target = 65;
  float loss = 0;
  std::vector<bf16> gradient(256);
  cross_entropy(logits.data(), &target, 1, 256, 0.5F, &loss, gradient.data());
  EXPECT_NEAR(static_cast<double>(loss), std::log(total) - static_cast<double>(logits[65]), 2e-6);
  for (std::size_t i = 0; i < 256; ++i) {
    const double expected =
        0.5 * (std::exp(static_cast<double>(logits[i])) / total - (i == 65 ? 1 : 0));
    EXPECT_NEAR(static_cast<double>(bf16_to_float(gradient[i])), expected,
                std::abs(expected) / 250 + 1e-9)
        << i;
  }
}

TEST(GptKernels, SoftmaxSeesNothingBeyondItsRow) {
  const CausalRows shape{.rows = 8, .first = 10, .leading = 32, .scale = 0.5F};
  std::vector<float> scores = normal_floats(8 * 32, 22, 3.0F);
  std::vector<float> poisoned = scores;
  for (std::size_t row = 0; row < 8; ++row) {
    for (std::size_t c = 10 + row + 1; c < 32; ++c) poisoned[row * 32 + c] = std::nanf("");
  }
  std::vector<bf16> a(scores.size());
  std::vector<bf16> b(scores.size());
  std::vector<RowStats> stats(8);
  causal_softmax(shape, scores.data(), a.data(), stats.data());
  causal_softmax(shape, poisoned.data(), b.data(), stats.data());
  EXPECT_EQ(a, b);
  for (std::size_t row = 0; row < 8; ++row) {
    double sum = 0;
    for (std::size_t c = 0; c < 32; ++c) {
      sum += static_cast<double>(bf16_to_float(a[row * 32 + c]));
      if (c > 10 + row) {
        EXPECT_EQ(a[row * 32 + c], 0) << row << "," << c;
      }
    }
    EXPECT_NEAR(sum, 1.0, 0.01);
  }
}

TEST(PortableLog, IsTheLogarithm) {
  for (double x = 1e-10; x < 1e10; x *= 1.37)
    EXPECT_NEAR(portable_log(x), std::log(x), 1e-12 + std::abs(std::log(x)) * 1e-12);
}

}  // namespace
}  // namespace ziggurat::gpt::kernels
