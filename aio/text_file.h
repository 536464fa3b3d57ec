// SPDX-License-Identifier: Apache-2.0
// aio/text_file.h: reads and writes small files as a whole. Reactor's thread.
#pragma once

#include <cstdint>
#include <string>

#include "aio/blocking_calls.h"
#include "aio/direct_file.h"

namespace ziggurat {

/// What a call needs to reach its files.
struct TextPlace {
  Reactor& reactor;
  IoEngine& io;
  IoObservers observers{};
  BlockingCalls calls{};
};

/// Reads a file. Errors: kDataLoss if it has more than `bytes_max`, before anything is read;
/// errno's.
Task<std::string> read_text(TextPlace place, std::string path, std::uint64_t bytes_max);
/// Replaces the text of `path`: afterwards the file has `text` or, after a failure, its old text.
/// Writes PATH.part, syncs and renames it. Durable once its directory was synced. Errors: errno's.
Task<> write_text(TextPlace place, std::string path, std::string text);

}  // namespace ziggurat
