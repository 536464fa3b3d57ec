// SPDX-License-Identifier: Apache-2.0
// aio/probe.h: picks the IoEngine that works here, by a real write and read-back, and says why not
// the others.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "aio/io_engine.h"

namespace ziggurat {

struct IoProbe {
  std::string engine;              ///< name of the choice
  std::vector<std::string> notes;  ///< "io_uring: io_uring_setup: EPERM (Operation not permitted);
                                   ///< kernel.io_uring_disabled=2 or a seccomp filter", ...
};

/// Tries io_uring, then libaio, then threads, each with a direct 4 KiB write and read-back in an
/// unnamed file in `directory`. Where nothing may be made there (a read-only mount, another user's
/// directory), who comes can only read: then each is tried with a read of a file that is there, if
/// one is. ZIGGURAT_IO=io_uring|libaio|threads forces one. A fallback is a degraded mode: logged
/// once. Errors: kUnavailable if none works, with each one's reason.
std::unique_ptr<IoEngine> choose_io_engine(Reactor& reactor, const std::string& directory,
                                           IoProbe* probe = nullptr);

/// The engine that it chooses, not yet made, for a directory that may not answer: on a thread that
/// may wait for it. What is returned asks the directory for nothing, and is called on the reactor's
/// thread.
using MakeIoEngine = std::function<std::unique_ptr<IoEngine>(Reactor&)>;
MakeIoEngine chosen_io_engine(const std::string& directory, IoProbe* probe = nullptr);

/// choose_io_engine(), for whoever is given a function: who finds it there may choose on a thread
/// that may wait.
struct ChooseIoEngine {
  std::unique_ptr<IoEngine> operator()(Reactor& reactor, const std::string& directory) const {
    return choose_io_engine(reactor, directory);
  }
};

}  // namespace ziggurat
