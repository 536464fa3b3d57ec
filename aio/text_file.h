// SPDX-License-Identifier: Apache-2.0
// aio/text_file.h: small files read and written as a whole. Reactor's thread.
#pragma once

#include <cstdint>
#include <string>

#include "aio/blocking_calls.h"
#include "aio/direct_file.h"

namespace ziggurat {

/// Where the files of a call are.
struct TextPlace {
  Reactor& reactor;
  IoEngine& io;
  IoObservers observers{};
  BlockingCalls calls{};
};

/// Errors: kDataLoss for one of more than `bytes_max`, before anything is read; errno's.
Task<std::string> read_text(TextPlace place, std::string path, std::uint64_t bytes_max);
/// `path` has `text`, or what it had: written beside it as PATH.part, synced, renamed. Durable once
/// its directory was synced. Errors: errno's.
Task<> write_text(TextPlace place, std::string path, std::string text);

}  // namespace ziggurat
