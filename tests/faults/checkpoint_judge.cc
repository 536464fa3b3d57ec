// SPDX-License-Identifier: Apache-2.0
// tests/faults/checkpoint_judge.cc: every byte is hashed, and every tensor compared.
#include "tests/faults/checkpoint_judge.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <fstream>

namespace ziggurat::testing {
namespace {

namespace fs = std::filesystem;

/// Why it is not step `step`'s checkpoint; empty: it is.
std::string fault_of(Runtime& runtime, const std::string& directory, std::uint64_t step,
                     const States& expected) {
  if (!expected.contains(step)) return "no run makes this step";
  try {
    {
      OpenCheckpoint checkpoint(runtime, directory);
      if (checkpoint.reader().content().step != step) return "it says that it is another step's";
      runtime.reactor.block_on([](CheckpointReader& reader) -> Task<> {
        for (std::size_t f = 0; f < reader.manifest().files.size(); ++f)
          co_await reader.prove_header(f);
      }(checkpoint.reader()));
    }
    const std::vector<std::string> wrong =
        differing(tensors_of(runtime, directory), expected.at(step));
    return wrong.empty() ? "" : fmt::format("other bits in {}", fmt::join(wrong, ", "));
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace

FoundCheckpoints look_at_checkpoints(const std::string& folder, const States& expected) {
  FoundCheckpoints found;
  if (!fs::exists(folder)) return found;
  const auto runtime = Runtime::create({.threads = 1, .pin = false, .trace_path = ""});
  std::string latest;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name == ".lock") continue;
    if (name == "latest") {
      std::ifstream(entry.path()) >> latest;
      if (latest.empty()) found.problems.emplace_back("latest is empty");
      continue;
    }
    if (!fs::exists(entry.path() / Manifest::kFileName)) {
      found.leftovers.push_back(name);
      continue;
    }
    const std::uint64_t step = std::stoull(name.substr(name.find('-') + 1));
    const std::string fault = fault_of(*runtime, entry.path().string(), step, expected);
    if (fault.empty()) {
      found.whole.insert(step);
    } else {
      found.problems.push_back(fmt::format("{}: {}", name, fault));
    }
  }
  const auto is_it = [&](std::uint64_t step) { return checkpoint_name(step) == latest; };
  if (!latest.empty() && std::ranges::none_of(found.whole, is_it))
    found.problems.push_back(fmt::format("latest names {}, which is not there whole", latest));
  return found;
}

}  // namespace ziggurat::testing
