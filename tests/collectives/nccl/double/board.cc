// SPDX-License-Identifier: Apache-2.0
// tests/collectives/nccl/double/board.cc: memory of several processes, and rings in it.
#include "tests/collectives/nccl/double/board.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace ziggurat::nccl_double {

std::string Board::create() {
  // Kept open: other processes find it under this one's descriptor.
  const int file = ::memfd_create("nccl double", MFD_CLOEXEC);
  if (file < 0 || ::ftruncate(file, sizeof(Board)) != 0) return {};
  return std::to_string(::getpid()) + " " + std::to_string(file);
}

Board* Board::open(const std::string& place) {
  const std::size_t gap = place.find(' ');
  const std::string path = "/proc/" + place.substr(0, gap) + "/fd/" + place.substr(gap + 1);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return nullptr;
  void* const memory = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  return memory == MAP_FAILED ? nullptr : static_cast<Board*>(memory);
}

std::byte* Transfer::at(std::size_t offset, std::size_t* length) noexcept {
  if (offset < sizeof(Header)) {
    *length = sizeof(Header) - offset;
    return reinterpret_cast<std::byte*>(sends ? &header : &heard) + offset;
  }
  *length = size - (offset - sizeof(Header));
  return bytes + (offset - sizeof(Header));
}

void Transfer::move(Pipe& pipe) {
  while (!ended()) {
    const std::uint64_t written = pipe.written.load(std::memory_order_acquire);
    const std::uint64_t read = pipe.read.load(std::memory_order_acquire);
    const std::uint64_t here = sends ? written : read;
    const std::size_t room =
        static_cast<std::size_t>(sends ? Pipe::kBytes - (written - read) : written - read);
    std::size_t length = 0;
    std::byte* const own = at(done, &length);
    length = std::min({length, room, Pipe::kBytes - static_cast<std::size_t>(here % Pipe::kBytes)});
    if (length == 0) return;
    std::byte* const shared = pipe.ring.data() + here % Pipe::kBytes;
    std::memcpy(sends ? shared : own, sends ? own : shared, length);
    (sends ? pipe.written : pipe.read).store(here + length, std::memory_order_release);
    done += length;
    if (!sends && done == sizeof(Header) && heard != header) {
      throw std::string("ranks made different calls: own call ") + std::to_string(header.call) +
          ", sequence " + std::to_string(header.sequence) + ", count " +
          std::to_string(header.count) + "; rank " + std::to_string(peer) + ": call " +
          std::to_string(heard.call) + ", sequence " + std::to_string(heard.sequence) + ", count " +
          std::to_string(heard.count);
    }
  }
}

}  // namespace ziggurat::nccl_double
