// SPDX-License-Identifier: Apache-2.0
// bench/optimizer_bench.cc: what does hashing a record cost inside its update, beside an update
// alone and beside memory? `ziggurat bench optimizer` measures the same without hashes
// (integrations/measure/optimizer_suite.h), and says what the figures are.
//   optimizer_bench [PARAMS [ROUNDS]]     (default 25,000,000 and 7)
#include <fmt/format.h>

#include <cstdlib>
#include <exception>

#include "integrations/measure/optimizer_suite.h"

int main(int argc, char** argv) {
  using namespace ziggurat;
  measure::OptimizerBenchOptions options;
  options.params = 25'000'000;
  options.formats = {StateFormat::kFp32};
  if (argc > 1) options.params = std::strtoull(argv[1], nullptr, 10);
  if (argc > 2) options.rounds = static_cast<std::uint32_t>(std::strtoul(argv[2], nullptr, 10));
  const measure::Progress progress{[](const std::string&) {}, [](const std::string&) {}};
  try {
    for (const bool hashed : {false, true}) {
      options.hashed = hashed;
      fmt::print("{}\n", hashed ? "with the hashes before and after" : "without hashes");
      for (const auto& line : measure::optimizer_table(run_optimizer_bench(options, progress)))
        fmt::print("{}\n", line);
    }
  } catch (const std::exception& error) {
    fmt::print(stderr, "optimizer_bench: {}\n", error.what());
    return 1;
  }
  return 0;
}
