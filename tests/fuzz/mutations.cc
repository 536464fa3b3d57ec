// SPDX-License-Identifier: Apache-2.0
// tests/fuzz/mutations.cc: a fuzz target without a fuzzer: its first inputs, and what they become
// when bytes are changed, moved, cut off or repeated. For builds without libFuzzer, and so for
// every run of the tests: TARGET_mutations FOLDER COUNT.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "tests/fuzz/fuzz_target.h"

namespace {

std::vector<std::string> first_inputs(const std::string& folder) {
  std::vector<std::string> inputs{""};
  if (!std::filesystem::exists(folder)) return inputs;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream file(entry.path(), std::ios::binary);
    inputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return inputs;
}

void mutate(std::string& input, std::mt19937_64& random) {
  const std::size_t at = input.empty() ? 0 : random() % input.size();
  const std::size_t length = std::min<std::size_t>(input.size() - at, random() % 64);
  switch (random() % 6) {
    case 0: input.insert(at, 1, static_cast<char>(random())); break;
    case 1: input.resize(at); break;
    case 2: input.insert(at, input.substr(input.size() - length)); break;
    case 3: input.erase(at, length); break;
    default:
      if (!input.empty()) input[at] = static_cast<char>(random());
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const std::vector<std::string> inputs = first_inputs(argv[1]);
  const std::uint64_t count = std::strtoull(argv[2], nullptr, 10);
  std::mt19937_64 random(20261124);
  const auto run = [](const std::string& input) {
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(input.data()), input.size());
  };
  for (const std::string& input : inputs) run(input);
  for (std::uint64_t i = 0; i < count; ++i) {
    std::string input = inputs[random() % inputs.size()];
    for (std::uint64_t n = random() % 8 + 1; n > 0; --n) mutate(input, random);
    run(input);
  }
  std::cout << inputs.size() << " inputs, " << count << " mutations: taken or refused\n";
  return 0;
}
