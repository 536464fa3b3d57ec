// SPDX-License-Identifier: Apache-2.0
// aio/text_file.cc: one transfer each.
#include "aio/text_file.h"

#include <fmt/format.h>

#include <span>

#include "base/error.h"

namespace ziggurat {

Task<std::string> read_text(TextPlace place, std::string path, std::uint64_t bytes_max) {
  std::unique_ptr<DirectFile> file;
  const std::function<void()> open = [&] {
    file = DirectFile::open(place.reactor, place.io, path, {.direct = false}, place.observers);
  };
  co_await place.calls.run(place.reactor, open);
  const std::uint64_t size = file->size_bytes();
  if (size > bytes_max) {
    throw Error(ErrorCode::kDataLoss,
                fmt::format("{} has {} bytes, but at most {} may be read", path, size, bytes_max));
  }
  std::string text(size, '\0');
  co_await file->read(0, std::as_writable_bytes(std::span(text)));
  co_return text;
}

Task<> write_text(TextPlace place, std::string path, std::string text) {
  const std::string part = path + ".part";
  std::unique_ptr<DirectFile> file;
  const std::function<void()> open = [&] {
    if (place.io.exists(part)) place.io.remove(part);
    file = DirectFile::open(place.reactor, place.io, part,
                            {.create = true, .writable = true, .direct = false}, place.observers);
    if (!text.empty()) file->allocate(text.size());
  };
  co_await place.calls.run(place.reactor, open);
  co_await file->write(0, std::as_bytes(std::span(text)));
  co_await file->sync();
  file.reset();
  const std::function<void()> rename = [&] { place.io.rename(part, path); };
  co_await place.calls.run(place.reactor, rename);
}

}  // namespace ziggurat
