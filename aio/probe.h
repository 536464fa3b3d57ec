// SPDX-License-Identifier: Apache-2.0
// aio/probe.h: chooses the IoEngine that works on this machine by a real write and read-back, and
// says why each of the others does not.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "aio/io_engine.h"

namespace ziggurat {

struct IoProbe {
  std::string engine;              ///< name of the chosen engine
  std::vector<std::string> notes;  ///< "io_uring: io_uring_setup: EPERM (Operation not permitted);
                                   ///< kernel.io_uring_disabled=2 or a seccomp filter", ...
};

/// Tries io_uring, then libaio, then threads, each with a direct 4 KiB write and read-back in an
/// unnamed file in `directory`. If this user may not make a file there (a read-only mount, another
/// user's directory), the program can only read: each engine is then tried by reading a file of the
/// directory, if there is one. ZIGGURAT_IO=io_uring|libaio|threads forces one. A fallback is a
/// degraded mode and is logged once. Errors: kUnavailable if none works, with the reason of each.
std::unique_ptr<IoEngine> choose_io_engine(Reactor& reactor, const std::string& directory,
                                           IoProbe* probe = nullptr);

/// Chooses as choose_io_engine() does, but does not make the engine yet. For a directory that may
/// not answer: call this on a thread that may wait for it. The returned function does not access
/// the directory; call it on the reactor's thread.
using MakeIoEngine = std::function<std::unique_ptr<IoEngine>(Reactor&)>;
MakeIoEngine chosen_io_engine(const std::string& directory, IoProbe* probe = nullptr);

/// choose_io_engine() as a function object, for callers that accept any function. A caller that
/// recognizes this type may choose on a thread that may wait.
struct ChooseIoEngine {
  std::unique_ptr<IoEngine> operator()(Reactor& reactor, const std::string& directory) const {
    return choose_io_engine(reactor, directory);
  }
};

}  // namespace ziggurat
