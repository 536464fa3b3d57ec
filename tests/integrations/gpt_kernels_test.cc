// SPDX-License-Identifier: Apache-2.0
// tests/integrations/gpt_kernels_test.cc: the kernels against plain double arithmetic, and every
// SIMD target against the narrowest, bit for bit.
#include <gmock/gmock.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <string>

#include "integrations/gpt/kernels.h"
#include "integrations/gpt/random.h"
#include "optimizer/gradient.h"
#include "tests/support/typed_values.h"

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
constexpr auto kCount = static_cast<std::size_t>(kRows * kWidth);

/// Values of a type, as the kernels take them.
class Values {
 public:
  Values(DType dtype, std::size_t count) : dtype_(dtype), bytes_(count * size_bytes(dtype)) {}
  static Values normal(DType dtype, std::size_t count, std::uint64_t key, float scale = 1.0F) {
    Values values(dtype, count);
    round_params(normal_floats(count, key, scale), {dtype, values.bytes_});
    return values;
  }
  Array array() { return {dtype_, bytes_.data()}; }
  ConstArray array() const { return {dtype_, bytes_.data()}; }
  float operator[](std::size_t i) const { return testing::value_at({dtype_, bytes_}, i); }
  std::string bytes() const {
    return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()};
  }

 private:
  DType dtype_;
  std::vector<std::byte> bytes_;
};

// Every kernel once; its outputs as bytes, by its name.
class AllKernels {
 public:
  explicit AllKernels(DType dtype) : dtype_(dtype) {}
  std::map<std::string, std::string> run() {
    epilogues();
    norms();
    attention();
    ends();
    parts_of_ends();
    return out_;
  }

 private:
  Values values(std::size_t count) const { return {dtype_, count}; }
  Values normal(std::size_t count, std::uint64_t key, float scale = 1.0F) const {
    return Values::normal(dtype_, count, key, scale);
  }
  void keep(const char* kernel, const Values& values) { out_[kernel] += values.bytes(); }
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
    const Values bias = normal(kWidth, 2);
    const Values residual = normal(kCount, 3);
    const Tile t{tile.data(), kWidth, kRows, kWidth};
    Values a = values(kCount);
    Values b = values(kCount);
    const Rows rows_a{a.array(), kWidth};
    const Rows rows_b{b.array(), kWidth};
    store({tile.data(), kWidth, kRows, kWidth - 5}, rows_a);
    keep("store", a);
    store_bias(t, bias.array(), rows_a);
    keep("store_bias", a);
    store_bias_residual(t, bias.array(), {residual.array(), kWidth}, rows_a);
    keep("store_bias_residual", a);
    store_bias_gelu(t, bias.array(), rows_a, rows_b);
    keep("store_bias_gelu", a);
    keep("store_bias_gelu", b);
    store_gelu_backward(t, rows_a);
    keep("store_gelu_backward", a);
    std::vector<float> wide(kCount);
    widen(residual.array(), static_cast<std::int64_t>(kCount) - 3, wide.data());
    keep("widen", wide);
  }

  void norms() {
    const Values x = normal(kCount, 4, 3.0F);
    const Values dy = normal(kCount, 5);
    const Values weight = normal(kWidth, 6);
    const Values bias = normal(kWidth, 7);
    Values y = values(kCount);
    std::vector<RowStats> stats(kRows);
    layernorm(x.array(), kRows, kWidth, {weight.array(), bias.array()}, y.array(), stats.data());
    keep("layernorm", y);
    keep("layernorm", stats);
    Values gradient = normal(kCount, 8);
    layernorm_backward(dy.array(), x.array(), stats.data(), weight.array(), kRows, kWidth,
                       gradient.array(), gradient.array());
    keep("layernorm_backward", gradient);
    std::vector<float> d_weight(kWidth, 0.5F);
    std::vector<float> d_bias(kWidth, 0.25F);
    layernorm_backward_columns({dy.array(), kWidth}, {x.array(), kWidth}, stats.data(), kRows,
                               kWidth, d_weight.data(), d_bias.data());
    add_column_sums({dy.array(), kWidth}, kRows, kWidth, d_bias.data());
    keep("add_column_sums", d_weight);
    keep("add_column_sums", d_bias);
  }

  void attention() {
    const CausalRows shape{.rows = kRows, .first = 20, .leading = 64, .scale = 0.3F};
    const auto count = static_cast<std::size_t>(kRows * shape.leading);
    const auto scores = normal_floats(count, 9, 20.0F);
    const auto d_probabilities = normal_floats(count, 10);
    std::vector<float> work = scores;
    Values p = values(count);
    Values d_scores = values(count);
    std::vector<RowStats> stats(kRows);
    causal_softmax(shape, work.data(), p.array(), stats.data());
    keep("causal_softmax", p);
    keep("causal_softmax", stats);
    std::vector<float> dots(kRows);
    const Values a = normal(kCount, 11);
    const Values b = normal(kCount, 12);
    row_dots({a.array(), kWidth}, {b.array(), kWidth}, kRows, 41, dots.data());
    keep("row_dots", dots);
    causal_softmax_backward(shape, scores.data(), stats.data(), d_probabilities.data(), dots.data(),
                            p.array(), d_scores.array());
    keep("causal_softmax_backward", p);
    keep("causal_softmax_backward", d_scores);
  }

  void ends() {
    std::vector<std::uint8_t> tokens;
    for (std::int64_t i = 0; i < kRows; ++i) tokens.push_back(static_cast<std::uint8_t>(i * i % 7));
    const Values wte = normal(256 * kWidth, 13);
    const Values wpe = normal(16 * kWidth, 14);
    Values x = values(kCount);
    embed(tokens.data(), kRows, kWidth, 16, 3, wte.array(), wpe.array(), x.array());
    keep("embed", x);
    std::vector<float> d_wte(256 * kWidth);
    std::vector<float> d_wpe(16 * kWidth);
    embed_backward_columns(tokens.data(), kRows, kWidth, 16, x.array(), kWidth, d_wte.data(),
                           d_wpe.data());
    keep("embed_backward_columns", d_wte);
    keep("embed_backward_columns", d_wpe);
    const auto logits = normal_floats(kRows * 256, 15, 5.0F);
    std::vector<float> losses(kRows);
    Values d_logits = values(kRows * 256);
    cross_entropy(logits.data(), tokens.data(), kRows, 256, 0.01F, losses.data(), d_logits.array());
    keep("cross_entropy", losses);
    keep("cross_entropy", d_logits);
  }

  // The same where a rank has 96 of the 256 symbols.
  void parts_of_ends() {
    constexpr TokenRange kRange{32, 96};
    std::vector<std::uint8_t> tokens;
    for (std::int64_t i = 0; i < kRows; ++i)
      tokens.push_back(static_cast<std::uint8_t>(25 + i * i % 113));
    const Values wte = normal(96 * kWidth, 16);
    const Values wpe = normal(16 * kWidth, 17);
    const Values bias = normal(kWidth, 18);
    Values x = values(kCount);
    embed_tokens(tokens.data(), kRows, kWidth, kRange, wte.array(), x.array());
    keep("embed_tokens", x);
    Values y = values(kCount);
    add_positions(kRows, kWidth, 16, 5, wpe.array(), x.array(), y.array());
    keep("add_positions", y);
    add_bias_residual(x.array(), bias.array(), y.array(), kRows, kWidth, y.array());
    keep("add_bias_residual", y);
    std::vector<float> d_wte(96 * kWidth);
    std::vector<float> d_wpe(16 * kWidth);
    embed_tokens_backward_columns(tokens.data(), kRows, kWidth, kRange, y.array(), kWidth,
                                  d_wte.data());
    keep("embed_tokens_backward_columns", d_wte);
    add_positions_backward_columns(kRows, kWidth, 16, 5, y.array(), kWidth, d_wpe.data());
    keep("add_positions_backward_columns", d_wpe);
    const auto logits = normal_floats(kRows * 96, 19, 5.0F);
    std::vector<LogitsPart> parts(2 * kRows);
    softmax_part(logits.data(), tokens.data(), kRows, kRange, parts.data());
    std::copy_n(parts.begin(), kRows, parts.begin() + kRows);
    keep("softmax_part", parts);
    std::vector<float> losses(kRows);
    Values d_logits = values(kRows * 96);
    cross_entropy_of_parts(logits.data(), {parts.data(), kRows, 2}, tokens.data(), kRows, kRange,
                           0.01F, losses.data(), d_logits.array());
    keep("cross_entropy_of_parts", losses);
    keep("cross_entropy_of_parts", d_logits);
  }

  DType dtype_;
  std::map<std::string, std::string> out_;
};

class GptKernelsOfType : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(EveryType, GptKernelsOfType,
                         ::testing::Values(DType::kBFloat16, DType::kFloat16, DType::kFloat32),
                         [](const auto& one) { return std::string(to_string(one.param)); });

TEST_P(GptKernelsOfType, EveryTargetGivesTheSameBits) {
  const auto targets = simd_targets();
  ASSERT_GE(targets.size(), 2U) << "nothing to compare on this machine";
  force_simd_target(targets.back());
  const auto expected = AllKernels(GetParam()).run();
  for (const std::string_view target : targets) {
    force_simd_target(target);
    for (const auto& [kernel, bytes] : AllKernels(GetParam()).run()) {
      EXPECT_TRUE(bytes == expected.at(kernel))
          << kernel << ": " << target << " differs from " << targets.back();
    }
  }
  force_simd_target("");
}

TEST_P(GptKernelsOfType, RoundsAndWidensAsTheEngineDoes) {
  std::vector<float> values;
  for (std::uint32_t bits = 0; bits < 0xffff0000U; bits += 0x7fff)
    values.push_back(std::bit_cast<float>(bits));
  values.push_back(std::nanf(""));
  values.push_back(-INFINITY);
  Values rounded(GetParam(), values.size());
  const auto count = static_cast<std::int64_t>(values.size());
  store({values.data(), count, 1, count}, {rounded.array(), count});
  std::vector<std::byte> expected(values.size() * size_bytes(GetParam()));
  round_params(values, {GetParam(), expected});
  EXPECT_EQ(std::memcmp(rounded.array().data, expected.data(), expected.size()), 0);
  std::vector<float> wide(values.size());
  widen(rounded.array(), count, wide.data());
  for (std::size_t i = 0; i < wide.size(); ++i) {
    ASSERT_EQ(std::bit_cast<std::uint32_t>(wide[i]), std::bit_cast<std::uint32_t>(rounded[i]))
        << values[i];
  }
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

// Logits that differ so much that one rank's part is nothing beside another's are among them.
TEST(GptKernels, CrossEntropyOfPartsIsThatOfTheWhole) {
  constexpr std::int64_t kSome = 20;
  std::vector<float> logits = normal_floats(kSome * 256, 23, 6.0F);
  for (std::size_t c = 64; c < 128; ++c) logits[c] += 200.0F;
  std::vector<std::uint8_t> targets;
  for (std::int64_t row = 0; row < kSome; ++row)
    targets.push_back(static_cast<std::uint8_t>(13 * row));
  std::vector<float> losses(kSome);
  std::vector<float> gradient(kSome * 256);
  cross_entropy(logits.data(), targets.data(), kSome, 256, 0.5F, losses.data(), gradient.data());

  std::vector<std::vector<float>> cut(4);
  for (std::size_t i = 0; i < logits.size(); ++i) cut[i % 256 / 64].push_back(logits[i]);
  std::vector<LogitsPart> parts(4 * kSome);
  for (std::int64_t rank = 0; rank < 4; ++rank) {
    softmax_part(cut[static_cast<std::size_t>(rank)].data(), targets.data(), kSome, {64 * rank, 64},
                 &parts[static_cast<std::size_t>(rank * kSome)]);
  }
  for (std::int64_t rank = 0; rank < 4; ++rank) {
    std::vector<float> its_losses(kSome);
    std::vector<float> its_gradient(kSome * 64);
    cross_entropy_of_parts(cut[static_cast<std::size_t>(rank)].data(), {parts.data(), kSome, 4},
                           targets.data(), kSome, {64 * rank, 64}, 0.5F, its_losses.data(),
                           its_gradient.data());
    for (std::size_t row = 0; row < kSome; ++row) {
      EXPECT_NEAR(its_losses[row], losses[row], 1e-5F + 1e-6F * losses[row]);
      for (std::size_t c = 0; c < 64; ++c) {
        const float expected = gradient[row * 256 + static_cast<std::size_t>(64 * rank) + c];
        EXPECT_NEAR(its_gradient[row * 64 + c], expected, 1e-6F);
      }
    }
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
