// SPDX-License-Identifier: Apache-2.0
// integrations/gpt/core_rates.cc: products of three kinds, passes and copies, each for a while.
#include "integrations/gpt/core_rates.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <ctime>
#include <functional>
#include <vector>

#include "base/bytes.h"
#include "integrations/gpt/matmul.h"
#include "tiers/pool/host_mapping.h"

namespace ziggurat::gpt {
namespace {

constexpr std::size_t kTimesMin = 3;
constexpr std::size_t kPassBytes = 64 * kMiB;  // beyond the caches of a core, and of most sockets
constexpr std::size_t kPassPieceBytes = kMiB;
constexpr int kBf16Byte = 0x3c;  // twice: 0.0115, whose products are neither denormal nor large

/// Returns the median of how often `work` is done in a second.
double times_a_second(double seconds, const std::function<void()>& work) {
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point begun) {
    return std::chrono::duration<double>(Clock::now() - begun).count();
  };
  work();  // brings code and pages
  std::vector<double> took;
  const Clock::time_point begun = Clock::now();
  while (took.size() < kTimesMin || since(begun) < seconds) {
    const Clock::time_point before = Clock::now();
    work();
    took.push_back(std::max(1e-9, since(before)));
  }
  const auto middle = took.begin() + static_cast<std::ptrdiff_t>(took.size() / 2);
  std::ranges::nth_element(took, middle);
  return 1 / *middle;
}

/// Operands of a product, and what each worker needs beside them.
class Product {
 public:
  Product(std::int64_t rows, std::int64_t depth, std::int64_t columns, std::int64_t copies,
          WorkerPool& workers)
      : shape_{.m = rows,
               .k = depth,
               .n = columns,
               .a = {depth, false},
               .b = {columns, false},
               .leading_c = columns},
        copies_(copies),
        workers_(workers),
        product_(shape_, workers.threads()),
        a_(bytes_of(copies * rows * depth), std::byte{kBf16Byte}),
        b_(bytes_of(copies * depth * columns), std::byte{kBf16Byte}) {
    const WideElements wide = wide_elements_tiled(shape_);
    const auto each = static_cast<std::size_t>(TiledMatmul::tile_elements_max());
    for (std::size_t i = 0; i < workers.threads(); ++i) {
      scratch_.push_back({std::vector<float>(each),
                          std::vector<float>(static_cast<std::size_t>(wide.a)),
                          std::vector<float>(static_cast<std::size_t>(wide.b))});
    }
  }

  /// Returns the operations a second, of 1e9.
  double measure(double seconds) {
    const double operations = 2.0 * static_cast<double>(copies_) * static_cast<double>(shape_.m) *
                              static_cast<double>(shape_.k) * static_cast<double>(shape_.n);
    return operations / 1e9 * times_a_second(seconds, [&] { run(); });
  }

 private:
  struct Scratch {
    std::vector<float> tile, a, b;
  };
  static std::size_t bytes_of(std::int64_t elements) {
    return static_cast<std::size_t>(elements) * sizeof(bf16);
  }

  void run() {
    const std::size_t tiles = product_.tile_count();
    workers_.run_team([&](Team& team) {
      team.for_each(tiles * static_cast<std::size_t>(copies_), [&](std::size_t i) {
        Scratch& own = scratch_[team.index()];
        const auto copy = static_cast<std::int64_t>(i / tiles);
        const ConstArray a(DType::kBFloat16, a_.data());
        const ConstArray b(DType::kBFloat16, b_.data());
        product_.compute(i % tiles, team.index(), a + copy * shape_.m * shape_.k,
                         b + copy * shape_.k * shape_.n, own.tile.data(), {own.a, own.b});
      });
    });
  }

  MatmulShape shape_;
  std::int64_t copies_;
  WorkerPool& workers_;
  TiledMatmul product_;
  std::vector<std::byte> a_, b_;
  std::vector<Scratch> scratch_;
};

}  // namespace

ComputeProfile measure_cores(WorkerPool& workers, double seconds) {
  ComputeProfile found;
  found.threads = workers.threads();
  const auto product = [&](std::int64_t rows, std::int64_t depth, std::int64_t columns,
                           std::int64_t copies) {
    return Product(rows, depth, columns, copies, workers).measure(seconds);
  };
  constexpr std::int64_t kRows = 512;  // tokens
  constexpr std::int64_t kHidden = 1024;
  constexpr std::int64_t kHeads = 16;
  found.layer_gflop_per_s = product(kRows, kHidden, 4 * kHidden, 1);
  found.unaligned_gflop_per_s = product(kRows, kHidden, 4 * kHidden + 1, 1);
  found.attention_gflop_per_s = product(kRows, kHidden / kHeads, kRows, kHeads);

  HostMapping memory({.owner = "the copies", .size_bytes = 2 * kPassBytes});
  std::byte* const from = memory.bytes().data();
  std::byte* const to = from + kPassBytes;
  std::memset(from, kBf16Byte, 2 * kPassBytes);
  found.pass_gb_per_s =
      2 * static_cast<double>(kPassBytes) / 1e9 * times_a_second(seconds, [&] {
        workers.for_each(kPassBytes / kPassPieceBytes, [&](std::size_t i) {
          std::memcpy(to + i * kPassPieceBytes, from + i * kPassPieceBytes, kPassPieceBytes);
        });
      });
  found.copy_gb_per_s = static_cast<double>(kPassBytes) / 1e9 *
                        times_a_second(seconds, [&] { std::memcpy(to, from, kPassBytes); });
  found.measured_at = fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
  return found;
}

}  // namespace ziggurat::gpt
