// SPDX-License-Identifier: Apache-2.0
// tests/support/faults_under.h: puts faults between an engine and the drive that it really has.
#pragma once

#include <memory>
#include <string>

#include "aio/faulty_engine.h"
#include "aio/probe.h"
#include "core/engine/runtime.h"

namespace ziggurat::testing {

/// Lets what opens on `runtime` from now on do its I/O through a FaultyEngine, which `drive` then
/// points to.
inline void put_faults_under(Runtime& runtime, FaultyEngine*& drive) {
  runtime.io_engine = [&drive](Reactor& reactor, const std::string& path) {
    auto faulty = std::make_unique<FaultyEngine>(reactor, choose_io_engine(reactor, path));
    drive = faulty.get();
    return faulty;
  };
}

}  // namespace ziggurat::testing
