// SPDX-License-Identifier: Apache-2.0
// collectives/random.h: numbers that nobody can guess, from libcrypto's generator. Any thread.
// Errors of all functions: kUnavailable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace ziggurat {

void fill_random(std::span<std::byte> bytes);
std::uint64_t random_number();
/// Returns 256 random bits in hexadecimal.
std::string random_secret();

}  // namespace ziggurat
