// SPDX-License-Identifier: Apache-2.0
// tests/cuda_double/ptx/fatbin.cc: see fatbin.h.
//
// The wrapper is documented (fatbinary_section.h); what it points to is not. It was read off
// objects of nvcc 13.0: a header of 16 bytes (magic, version, size of the header, size of the
// entries), and entries that begin with their kind, version, header size and payload size.
#include "tests/cuda_double/ptx/fatbin.h"

#include <fatbinary_section.h>
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/error.h"

namespace ziggurat::cuda_double::ptx {
namespace {

struct Header {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t header_bytes;
  std::uint64_t size_bytes;
};
constexpr std::uint32_t kMagic = 0xba55ed50;

struct Entry {
  std::uint16_t kind;
  std::uint16_t version;
  std::uint32_t header_bytes;
  std::uint64_t size_bytes;
};
constexpr std::uint16_t kPtx = 1;

template <class T>
T read(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

}  // namespace

std::vector<std::string> ptx_of(const void* wrapper) {
  const auto outer = read<__fatBinC_Wrapper_t>(static_cast<const std::byte*>(wrapper));
  const auto* at = reinterpret_cast<const std::byte*>(outer.data);
  const auto header = read<Header>(at);
  if (outer.magic != FATBINC_MAGIC || header.magic != kMagic) {
    throw Error(ErrorCode::kUnimplemented, "a fat binary of an unknown form");
  }
  at += header.header_bytes;
  const std::byte* const end = at + header.size_bytes;
  std::vector<std::string> found;
  while (at < end) {
    const auto entry = read<Entry>(at);
    if (entry.kind == kPtx) {
      const auto* text = reinterpret_cast<const char*>(at + entry.header_bytes);
      const std::string ptx(text, strnlen(text, entry.size_bytes));
      if (ptx.find(".version") == std::string::npos) {
        throw Error(ErrorCode::kUnimplemented,
                    "the PTX of a kernel is compressed: compile it with --no-compress");
      }
      found.push_back(ptx);
    }
    at += entry.header_bytes + entry.size_bytes;
  }
  if (found.empty()) {
    throw Error(ErrorCode::kUnimplemented,
                "a fat binary has machine code and no PTX: compile for compute_80 too");
  }
  return found;
}

}  // namespace ziggurat::cuda_double::ptx
