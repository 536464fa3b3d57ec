// SPDX-License-Identifier: Apache-2.0
// aio/range_file.cc: moves the head, the blocks and the tail of a range at the same time.
#include "aio/range_file.h"

#include <algorithm>
#include <array>
#include <functional>

#include "base/bytes.h"
#include "base/runtime/for_each.h"

namespace ziggurat {

std::unique_ptr<RangeFile> RangeFile::open(Reactor& reactor, IoEngine& engine,
                                           const std::string& path, OpenOptions options,
                                           IoObservers observers) {
  std::unique_ptr<RangeFile> file(new RangeFile(reactor));
  options.direct = false;
  file->edges_ = DirectFile::open(reactor, engine, path, options, observers);
  options.direct = true;
  options.create = false;
  options.lock = false;
  file->blocks_ = DirectFile::open(reactor, engine, path, options, observers);
  const DirectAlignment need = file->blocks_->alignment();
  if (kBlockBytes % need.offset_bytes != 0 || kBlockBytes % need.memory_bytes != 0)
    file->blocks_.reset();
  return file;
}

Task<> RangeFile::read(std::uint64_t offset_bytes, std::span<std::byte> memory,
                       IoPriority priority) {
  constexpr Move kMove = [](DirectFile& file, std::uint64_t offset, std::span<std::byte> part,
                            IoPriority its) { return file.read(offset, part, its); };
  return run(kMove, offset_bytes, memory, priority);
}

Task<> RangeFile::write(std::uint64_t offset_bytes, std::span<const std::byte> memory,
                        IoPriority priority) {
  constexpr Move kMove = [](DirectFile& file, std::uint64_t offset, std::span<std::byte> part,
                            IoPriority its) { return file.write(offset, part, its); };
  // One function serves both directions. A write only reads the memory, so the cast is safe.
  return run(kMove, offset_bytes, {const_cast<std::byte*>(memory.data()), memory.size()}, priority);
}

Task<> RangeFile::run(Move move, std::uint64_t offset_bytes, std::span<std::byte> memory,
                      IoPriority priority) {
  const std::uint64_t end = offset_bytes + memory.size();
  const std::uint64_t first = round_up(offset_bytes, kBlockBytes);
  const std::uint64_t last = end / kBlockBytes * kBlockBytes;
  if (!blocks_ || !is_placed(offset_bytes, memory) || first >= last) {
    co_await move(*edges_, offset_bytes, memory, priority);
    co_return;
  }
  struct Part {
    DirectFile& file;
    std::uint64_t begin, end;
  };
  const std::array<Part, 3> parts{
      {{*blocks_, first, last}, {*edges_, offset_bytes, first}, {*edges_, last, end}}};
  const std::function<Task<>(std::size_t)> one = [&](std::size_t i) {
    const Part& part = parts[i];
    return move(part.file, part.begin,
                memory.subspan(part.begin - offset_bytes, part.end - part.begin), priority);
  };
  co_await for_each_index(reactor_, parts.size(), parts.size(), one);
}

}  // namespace ziggurat
