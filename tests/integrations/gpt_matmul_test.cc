// SPDX-License-Identifier: Apache-2.0
// tests/integrations/gpt_matmul_test.cc: tiles against plain sums, and no threads but our own.
#include <gmock/gmock.h>

#include <cstdlib>
#include <filesystem>
#include <thread>

#include "base/runtime/worker_pool.h"
#include "integrations/gpt/matmul.h"
#include "integrations/gpt/random.h"
#include "optimizer/gradient.h"
#include "tests/support/typed_values.h"

namespace ziggurat::gpt {
namespace {

struct Matrix {
  DType dtype;
  std::vector<std::byte> bytes;

  TypedSpan<const std::byte> values() const { return {dtype, bytes}; }
};

Matrix normal_matrix(DType dtype, std::int64_t count, std::uint64_t key) {
  std::vector<float> values(static_cast<std::size_t>(count));
  fill_normal(key, 0, values);
  Matrix matrix{dtype, std::vector<std::byte>(values.size() * size_bytes(dtype))};
  round_params(values, {dtype, matrix.bytes});
  return matrix;
}

double at(const Matrix& matrix, const Layout& layout, std::int64_t row, std::int64_t column) {
  const std::int64_t index =
      layout.transposed ? column * layout.leading + row : row * layout.leading + column;
  return static_cast<double>(testing::value_at(matrix.values(), static_cast<std::size_t>(index)));
}

// The whole product, dense, by tiles.
std::vector<float> run(const MatmulShape& shape, const Matrix& a, const Matrix& b,
                       std::size_t threads) {
  WorkerPool workers({.threads = threads, .cpus = {}, .trace = nullptr});
  const TiledMatmul matmul(shape, threads);
  const WideElements wide = wide_elements_tiled(shape);
  const auto tile_size = static_cast<std::size_t>(TiledMatmul::tile_elements_max());
  std::vector<std::vector<float>> tiles(threads, std::vector<float>(tile_size));
  std::vector<std::vector<float>> wide_a(threads,
                                         std::vector<float>(static_cast<std::size_t>(wide.a)));
  std::vector<std::vector<float>> wide_b(threads,
                                         std::vector<float>(static_cast<std::size_t>(wide.b)));
  std::vector<float> c(static_cast<std::size_t>(shape.m * shape.leading_c),
                       shape.add ? 0.5F : -1.0F);
  workers.run_team([&](Team& team) {
    const std::size_t w = team.index();
    team.for_each(matmul.tile_count(), [&](std::size_t i) {
      if (shape.add) {
        matmul.accumulate(i, w, a.values(), b.values(), c.data(), {wide_a[w], wide_b[w]});
        return;
      }
      matmul.compute(i, w, a.values(), b.values(), tiles[w].data(), {wide_a[w], wide_b[w]});
      const TiledMatmul::Tile& t = matmul.tile(i);
      for (std::int64_t r = 0; r < t.rows; ++r) {
        std::copy_n(tiles[w].data() + r * t.columns, t.columns,
                    c.data() + (t.row + r) * shape.leading_c + t.column);
      }
    });
  });
  return c;
}

struct Case {
  const char* name;
  MatmulShape shape;
};

class GptMatmul : public ::testing::TestWithParam<std::tuple<Case, DType>> {};

TEST_P(GptMatmul, TilesMakeTheWholeProductWithAnyNumberOfWorkers) {
  MatmulShape s = std::get<Case>(GetParam()).shape;
  s.dtype = std::get<DType>(GetParam());
  const auto a = normal_matrix(s.dtype, (s.a.transposed ? s.k : s.m) * s.a.leading, 1);
  const auto b = normal_matrix(s.dtype, (s.b.transposed ? s.n : s.k) * s.b.leading, 2);
  const auto c = run(s, a, b, 1);
  for (std::int64_t row = 0; row < s.m; row += 13) {
    for (std::int64_t column = 0; column < s.n; column += 7) {
      double expected = s.add ? 0.5 : 0.0;
      for (std::int64_t k = 0; k < s.k; ++k) expected += at(a, s.a, row, k) * at(b, s.b, k, column);
      ASSERT_NEAR(static_cast<double>(c[static_cast<std::size_t>(row * s.leading_c + column)]),
                  expected, 1e-3)
          << row << "," << column;
    }
  }
  EXPECT_EQ(run(s, a, b, 2), c);
  EXPECT_EQ(run(s, a, b, 3), c);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, GptMatmul,
    ::testing::Combine(
        ::testing::Values(
            Case{"plain",
                 {.m = 600,
                  .k = 64,
                  .n = 400,
                  .a = {64, false},
                  .b = {400, false},
                  .leading_c = 400}},
            Case{"input_gradient",
                 {.m = 70, .k = 96, .n = 256, .a = {96, false}, .b = {96, true}, .leading_c = 256}},
            Case{"weight_gradient",
                 {.m = 300,
                  .k = 130,
                  .n = 400,
                  .a = {300, true},
                  .b = {400, false},
                  .leading_c = 400,
                  .add = true}},
            Case{"strided",
                 {.m = 33, .k = 20, .n = 17, .a = {48, false}, .b = {50, true}, .leading_c = 64}},
            Case{"whole_rows",
                 {.m = 700,
                  .k = 32,
                  .n = 256,
                  .a = {32, false},
                  .b = {32, true},
                  .leading_c = 256,
                  .whole_rows = true}},
            Case{"one",
                 {.m = 1, .k = 1, .n = 1, .a = {1, false}, .b = {1, false}, .leading_c = 1}}),
        ::testing::Values(DType::kBFloat16, DType::kFloat16, DType::kFloat32)),
    [](const auto& one) {
      return std::get<Case>(one.param).name +
             ("_" + std::string(to_string(std::get<DType>(one.param))));
    });

// fp32 holds every fp16 and bf16 value: widened or not, it is the same product.
TEST(GptMatmulTypes, WideningIsExact) {
  const MatmulShape shape{.m = 130,
                          .k = 64,
                          .n = 96,
                          .a = {64, false},
                          .b = {96, false},
                          .leading_c = 96,
                          .dtype = DType::kFloat16};
  const auto a = normal_matrix(shape.dtype, 130 * 64, 3);
  const auto b = normal_matrix(shape.dtype, 64 * 96, 4);
  const auto widened = [](const Matrix& matrix) {
    Matrix wide{DType::kFloat32, std::vector<std::byte>(matrix.bytes.size() * 2)};
    const auto to = TypedSpan<std::byte>{wide.dtype, wide.bytes}.as<float>();
    for (std::size_t i = 0; i < to.size(); ++i) to[i] = testing::value_at(matrix.values(), i);
    return wide;
  };
  MatmulShape fp32 = shape;
  fp32.dtype = DType::kFloat32;
  const auto of_halves = run(shape, a, b, 1);
  const auto of_floats = run(fp32, widened(a), widened(b), 1);
  for (std::size_t i = 0; i < of_halves.size(); ++i)
    ASSERT_NEAR(of_halves[i], of_floats[i], 1e-5F) << i;  // tiles of other heights add alike
}

TEST(GptMatmulThreads, OneDnnStartsNone) {
  const auto threads = [] {
    const std::filesystem::directory_iterator tasks("/proc/self/task");
    return std::distance(begin(tasks), end(tasks));
  };
  const MatmulShape shape{.m = 512,
                          .k = 512,
                          .n = 512,
                          .a = {512, true},
                          .b = {512, false},
                          .leading_c = 512,
                          .add = true};
  const auto a = normal_matrix(shape.dtype, 512 * 512, 1);
  std::thread([] {}).join();  // a sanitizer starts a thread of its own with our first
  const auto before = threads();
  run(shape, a, a, 2);
  EXPECT_EQ(threads(), before) << "a thread stayed behind: an OpenMP team";
}

TEST(GptMatmulFingerprint, NamesLibraryAndInstructionSet) {
  EXPECT_THAT(matmul_fingerprint(), ::testing::StartsWith("oneDNN "));
  const char* isa = std::getenv("ONEDNN_MAX_CPU_ISA");
  if (isa != nullptr && std::string(isa) == "AVX2") {
    EXPECT_FALSE(has_bf16_products());
    EXPECT_THAT(matmul_fingerprint(), ::testing::HasSubstr("avx2, bf16 dot: no"));
  }
}

}  // namespace
}  // namespace ziggurat::gpt
