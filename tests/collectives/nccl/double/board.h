// SPDX-License-Identifier: Apache-2.0
// tests/collectives/nccl/double/board.h: the memory that the ranks of one communicator share, and
// bytes through it. A rank that dies leaves it as it is: what waits for that rank waits for ever.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ziggurat::nccl_double {

inline constexpr int kRanksMax = 8;

/// What a receiver compares with its own call, ahead of the bytes. Real ranks whose calls differ
/// hang, or mix their data; here they end the process.
struct Header {
  std::uint64_t call = 0;  ///< a function, in the order of nccl_double.cc
  std::uint64_t sequence = 0;
  std::uint64_t count = 0;
  std::uint64_t type = 0;

  bool operator==(const Header&) const = default;
};

/// Bytes from one rank to another.
struct Pipe {
  static constexpr std::size_t kBytes = 16 * 1024;
  alignas(64) std::atomic<std::uint64_t> written;
  alignas(64) std::atomic<std::uint64_t> read;
  std::array<std::byte, kBytes> ring;
};

struct Board {
  std::atomic<std::uint32_t> joined;
  std::atomic<std::uint32_t> finalizing;
  std::array<std::array<char, 32>, kRanksMax> gpus;
  std::array<std::array<Pipe, kRanksMax>, kRanksMax> pipes;  // [from][to]

  /// A file without a name, and where others find it: "PID FD".
  static std::string create();
  /// Null if the process that made it is gone.
  static Board* open(const std::string& place);
};

/// One message, under way.
struct Transfer {
  bool sends = false;
  int peer = 0;
  Header header;
  std::byte* bytes = nullptr;
  std::size_t size = 0;
  std::size_t done = 0;  // of the header and the bytes
  Header heard{};

  bool ended() const noexcept { return done == sizeof(Header) + size; }
  /// Moves what can be moved now. Errors: std::string of a header that differs.
  void move(Pipe& pipe);

 private:
  std::byte* at(std::size_t offset, std::size_t* length) noexcept;
};

}  // namespace ziggurat::nccl_double
