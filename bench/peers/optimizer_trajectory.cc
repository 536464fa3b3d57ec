// SPDX-License-Identifier: Apache-2.0
// bench/peers/optimizer_trajectory.cc: runs our optimizers as a filter, for optimizer_compare.py:
// reads fp32 masters and gradients, and writes the masters after each step.
//   optimizer_trajectory OPTIMIZER LR BETA1 BETA2 EPS WEIGHT_DECAY STEPS < in > out
// The input is one tile (16,384) of masters, then one tile of gradients for each step, in fp32 and
// this machine's byte order.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "base/check.h"
#include "optimizer/update.h"

namespace ziggurat {
namespace {

constexpr int kArguments = 8;

void read_floats(std::span<float> values) {
  const std::size_t count = std::fread(values.data(), sizeof(float), values.size(), stdin);
  ZIGGURAT_CHECK(count == values.size(), "standard input ended after {} of {} values", count,
                 values.size());
}

int run(char** argv) {
  OptimizerStep::Settings settings{.kind = parse_optimizer(argv[1]).value(),
                                   .learning_rate = std::strtof(argv[2], nullptr),
                                   .beta1 = std::strtof(argv[3], nullptr),
                                   .beta2 = std::strtof(argv[4], nullptr),
                                   .eps = std::strtof(argv[5], nullptr),
                                   .weight_decay = std::strtof(argv[6], nullptr),
                                   .grad_scale = 1.0F,
                                   .t = 0};
  const std::uint64_t steps = std::strtoull(argv[7], nullptr, 10);
  std::vector<float> param(kTileElements), grad(kTileElements);
  std::vector<std::byte> record(record_format(settings.kind, StateFormat::kFp32).record_bytes(1));
  read_floats(param);
  write_record(settings.kind, StateFormat::kFp32, param, record);
  const RecordView view{.record = record,
                        .grad = as_typed(std::span<const float>(grad)),
                        .param = as_typed(std::span<float>(param))};
  const DecayRun whole{0, kTileElements, true};
  for (settings.t = 1; settings.t <= steps; ++settings.t) {
    read_floats(grad);
    update_record(OptimizerStep::make(settings), view, {&whole, 1});
    const std::size_t written = std::fwrite(param.data(), sizeof(float), param.size(), stdout);
    ZIGGURAT_CHECK(written == param.size(), "standard output took {} values", written);
  }
  return 0;
}

}  // namespace
}  // namespace ziggurat

int main(int argc, char** argv) {
  if (argc != ziggurat::kArguments || !ziggurat::parse_optimizer(argv[1])) {
    std::fprintf(
        stderr, "the arguments are wrong: see the header of bench/peers/optimizer_trajectory.cc\n");
    return 2;
  }
  return ziggurat::run(argv);
}
