// SPDX-License-Identifier: Apache-2.0
// collectives/random.cc: libcrypto's RAND_bytes.
#include "collectives/random.h"

#include <fmt/format.h>
#include <openssl/rand.h>

#include <array>

#include "base/error.h"

namespace ziggurat {

void fill_random(std::span<std::byte> bytes) {
  if (RAND_bytes(reinterpret_cast<unsigned char*>(bytes.data()), static_cast<int>(bytes.size())) !=
      1) {
    throw Error(ErrorCode::kUnavailable,
                "libcrypto cannot make random numbers (RAND_bytes failed)");
  }
}

std::uint64_t random_number() {
  std::uint64_t number = 0;
  fill_random(std::as_writable_bytes(std::span(&number, 1)));
  return number;
}

std::string random_secret() {
  std::array<std::byte, 32> bytes{};
  fill_random(bytes);
  std::string text;
  for (const std::byte b : bytes) text += fmt::format("{:02x}", static_cast<unsigned>(b));
  return text;
}

}  // namespace ziggurat
