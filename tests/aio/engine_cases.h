// SPDX-License-Identifier: Apache-2.0
// tests/aio/engine_cases.h: every implementation of IoEngine. A new one is one line in
// engine_cases.cc.
#pragma once

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "aio/io_engine.h"

namespace ziggurat::testing_support {

using MakeEngine = std::function<std::unique_ptr<IoEngine>(Reactor&)>;

struct EngineCase {
  std::string name;
  Clock::Kind clock = Clock::Kind::kReal;
  bool on_disk =
      true;  ///< its files are the operating system's, so links, modes and threads can be tested
  std::function<MakeEngine()> make_world;  ///< engines that one world makes see the same files

  friend std::ostream& operator<<(std::ostream& out, const EngineCase& each) {
    return out << each.name;
  }
};

/// All engines of this build, each also inside a FaultyEngine with nothing planned.
const std::vector<EngineCase>& engine_cases();

}  // namespace ziggurat::testing_support
