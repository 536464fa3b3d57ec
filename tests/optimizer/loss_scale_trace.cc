// SPDX-License-Identifier: Apache-2.0
// tests/optimizer/loss_scale_trace.cc: the loss scale after each step of a sequence, for
// loss_scale_peers_test.py.
//
//   loss_scale_trace POWER WINDOW HYSTERESIS CONSECUTIVE MIN_SCALE STEPS     STEPS like 00101: 1 is
//   an overflow. Prints a scale a line, and "given up" where the scaler does.
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "base/error.h"
#include "optimizer/loss_scale.h"

int main(int argc, char** argv) {
  using namespace ziggurat;
  if (argc != 7) return 2;
  LossScaler scaler({.initial_scale_power = std::atoi(argv[1]),
                     .loss_scale_window = std::strtoull(argv[2], nullptr, 10),
                     .hysteresis = std::strtoull(argv[3], nullptr, 10),
                     .consecutive_hysteresis = std::string_view(argv[4]) == "1",
                     .min_loss_scale = std::strtod(argv[5], nullptr)});
  for (const char step : std::string_view(argv[6])) {
    try {
      scaler.update(step == '1');
    } catch (const Error&) {
      std::puts("given up");
      return 0;
    }
    std::printf("%.17g\n", scaler.scale());
  }
  return 0;
}
